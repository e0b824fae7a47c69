-- Decides which steps may make their model calls: the only place that does. KEYS[1] the state of the limits;
-- the other keys, all on its slot, are named after it. ARGV[1] the caller's name, ARGV[2] ms for which a grant
-- holds without a renewal, ARGV[3] operations (JSON), each {op, ...}:
--   try, ask, again   run, step, agent, tenant, fresh, names, amounts: a grant now, or nothing (try), or a place
--                     in the line (at its head: again). `names` are the limits of the call, the first is its line
--   settle, refund    run, step, amounts: ends a grant; the difference to what was reserved is charged, or all given back
--   renew             run, step: a grant of a step that is under way goes on
--   charge            names, amounts: a call that was made under other limits than its step's grant has
--   throttled         names, ms: the provider refused a call under the first of the names; nobody calls it for so long
--   tick              looks for grants that nobody renews
-- Returns { a word per operation, admitted, next, waiting, version, mine }: `admitted` (run, step, agent, ...) are to
-- be dispatched by the caller, also those that it requested itself; after `next` ms something may be admitted (-1: only when
-- a call ends); `waiting` steps wait in all; with `mine` the caller is to come back by then, else somebody else will.
--
-- A grant holds `r` requests, `i` and `o` tokens and `s` starts of every limit that it names, and one call in flight.
-- Rates are buckets that fill with time: a bucket may be overdrawn by one request that is larger than it, and by what
-- an estimate lacked. A measure of another kind (a budget) needs its lines in `measures_of`, `fits` and `take` only.
-- Invariants: a run has one grant, or one place in a line, of one step; who is in neither asks again when dispatched.
local prefix = string.sub(KEYS[1], 1, -6)
local settings_key, grants_key = prefix .. 'settings', prefix .. 'grants'
local waiting_key, lines_key = prefix .. 'waiting', prefix .. 'lines'
local caller, lease = ARGV[1], tonumber(ARGV[2])
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local MOST_LOOKS, MOST_ADMITTED, MOST_LINES = 128, 64, 32
local MOST_TENANTS, MOST_FLOWS, MOST_BLOCKED = 32, 12, 4
local SECOND_LIFE, TURN, SOON, IDLE = 1000, 500, 50, 600000
local CLASS = 1000000000000000
local SEP = '\31'
local EACH = { tenant = true, batch = true, agent = true }
local KINDS = { requests_per_minute = 'r', tokens_per_minute = 't', input_tokens_per_minute = 'i',
  output_tokens_per_minute = 'o', starts_per_minute = 's' }

-- ------------------------------------------------------------------ what is read once, and written at the end

local measures, states, touched = {}, {}, {}
local grants, grants_changed = {}, {}
local counts, counts_changed, waiting_total = {}, {}, 0
local admitted, was_admitted, next_ms, looks = {}, {}, nil, MOST_LOOKS

local function decoded(text)
  local readable, value = pcall(cjson.decode, text or '')
  return readable and type(value) == 'table' and value or nil
end

local function dispatch(e)
  for _, part in ipairs({ e.run, e.step, e.agent }) do admitted[#admitted + 1] = part end
end

local function soon(ms) if not next_ms or ms < next_ms then next_ms = ms end end

-- What a limit measures: rates per ms, calls in flight, ms of burst, and the weight of a tenant.
local function measures_of(limit, state)
  local m = { rates = {}, cap = tonumber(limit.in_flight), weight = tonumber(limit.weight) or 1,
    burst = (tonumber(limit.burst) or 1) * 1000 }
  for field, kind in pairs(KINDS) do
    local rate = tonumber(limit[field])
    if rate then m.rates[kind] = rate / 60000 end
  end
  local learned = tonumber(state.learned)
  if learned then m.rates.r = math.min(m.rates.r or learned / 60000, learned / 60000) end
  return m
end

local function capacity(m, kind) return math.max(m.rates[kind] * m.burst, 1) end

local function refill(name)
  local s, m = states[name], measures[name]
  local gone = math.max(now - (tonumber(s.at) or now), 0)
  for kind, rate in pairs(m.rates) do
    local most = capacity(m, kind)
    s[kind] = math.min(most, (tonumber(s[kind]) or most) + gone * rate)
  end
  s.at = now
end

-- Reads the limits that are not known yet, with their levels as they are now.
local function load(names)
  local missing, fields = {}, {}
  for _, name in ipairs(names) do
    if not states[name] then
      states[name] = {}
      missing[#missing + 1] = name
      fields[#fields + 1] = name
      local kind = string.match(name, '^(%a+):')
      fields[#fields + 1] = EACH[kind] and kind .. ':*' or name
    end
  end
  if #missing == 0 then return end
  local found = redis.call('HMGET', settings_key, unpack(fields))
  local known = redis.call('HMGET', KEYS[1], unpack(missing))
  for i, name in ipairs(missing) do
    local limit = decoded(found[2 * i - 1]) or decoded(found[2 * i]) or {}
    states[name] = decoded(known[i]) or {}
    measures[name] = measures_of(limit, states[name])
    refill(name)
  end
end

local function grant_of(run)
  if grants[run] == nil then grants[run] = decoded(redis.call('HGET', grants_key, run)) or false end
  return grants[run]
end

local function set_grant(run, grant)
  grants[run], grants_changed[run] = grant, true
end

local function count(line, by)
  counts[line] = math.max((counts[line] or 0) + by, 0)
  counts_changed[line] = true
  waiting_total = math.max(waiting_total + by, 0)
end

-- ------------------------------------------------------------------ buckets

local function amount(amounts, kind)
  if kind == 't' then return (amounts.i or 0) + (amounts.o or 0) end
  return amounts[kind] or 0
end

-- Whether a limit has room for a call; where not, the ms until it may have, or -1.
local function fits(name, amounts)
  local s, m = states[name], measures[name]
  local cool = tonumber(s.cool) or 0
  if cool > now then return false, cool - now, 'c' end
  if m.cap and (s.f or 0) + 1 > m.cap then return false, -1, 'f' end
  for kind, rate in pairs(m.rates) do
    local wanted = math.min(amount(amounts, kind), capacity(m, kind))
    if wanted > 0 and s[kind] < wanted - 0.000001 then
      return false, math.ceil((wanted - s[kind]) / rate), kind
    end
  end
  return true
end

local function take(names, amounts)
  for _, name in ipairs(names) do
    local s, m = states[name], measures[name]
    s.f = (s.f or 0) + 1
    for kind in pairs(m.rates) do s[kind] = s[kind] - amount(amounts, kind) end
    touched[name] = true
  end
end

local function give(grant, used)
  load(grant.names)
  for _, name in ipairs(grant.names) do
    local s, m = states[name], measures[name]
    s.f = math.max((s.f or 0) - 1, 0)
    for kind in pairs(m.rates) do
      local back = amount(grant.amounts, kind) - amount(used, kind)
      s[kind] = math.min(capacity(m, kind), s[kind] + back)
    end
    touched[name] = true
  end
end

-- Which limit keeps a call from being made, the ms until that may change, and what of it is short.
local function blocked_by(names, amounts)
  for _, name in ipairs(names) do
    local room, ms, kind = fits(name, amounts)
    if not room then return name, ms, kind end
  end
end

-- ------------------------------------------------------------------ lines

local function tenants_key(line) return prefix .. 'tenants:' .. line end
local function left_key(line) return prefix .. 'left:' .. line end
local function flows_key(line, tenant) return prefix .. 'flows:' .. line .. SEP .. tenant end

-- Steps of one tenant with the same limits, begun or fresh, are one flow: first come, first served.
local function flow_of(e)
  return prefix .. 'flow:' .. (e.fresh and '1' or '0') .. e.names[1] .. SEP .. e.tenant .. SEP .. table.concat(e.names, SEP)
end
local function class_of(flow) return tonumber(string.sub(flow, #prefix + 6, #prefix + 6)) * CLASS end

-- A tenant that begins to wait starts where the others are: idling earns nothing, and leaving a line and coming back
-- loses no debt.
local function enter(line, tenant)
  local key = tenants_key(line)
  if redis.call('ZSCORE', key, tenant) then return end
  local first = redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')
  local at = tonumber(first[2]) or tonumber(states[line].v) or 0
  local left = tonumber(redis.call('ZSCORE', left_key(line), tenant)) or 0
  redis.call('ZADD', key, math.max(at, left), tenant)
  redis.call('ZREM', left_key(line), tenant)
end

local function leave(line, tenant, at)
  redis.call('ZREM', tenants_key(line), tenant)
  redis.call('ZREMRANGEBYSCORE', left_key(line), '-inf', tonumber(states[line].v) or 0)
  redis.call('ZADD', left_key(line), at, tenant)
end

local function wait_in_line(e, head)
  local flow, line = flow_of(e), e.names[1]
  local size = redis.call(head and 'LPUSH' or 'RPUSH', flow, cjson.encode(e))
  if size == 1 then
    redis.call('ZADD', flows_key(line, e.tenant), class_of(flow) + now, flow)
    enter(line, e.tenant)
  end
  redis.call('HSET', waiting_key, e.run, e.step .. ' ' .. e.since .. ' ' .. (e.why or ''))
  count(line, 1)
end

local function grant(e)
  take(e.names, e.amounts)
  set_grant(e.run, { run = e.run, step = e.step, agent = e.agent, tenant = e.tenant, fresh = e.fresh,
    names = e.names, amounts = e.amounts, till = now + lease, waited = now - e.since, why = e.why })
end

-- How much of its line's limit a call takes, in minutes of the limit; of one without rates, calls count.
local function cost_of(line, amounts)
  local most
  for kind, rate in pairs(measures[line].rates) do
    most = math.max(most or 0, amount(amounts, kind) / rate / 60000)
  end
  return most or 1
end

local function weight_of(tenant)
  local name = 'tenant:' .. tenant
  load({ name })
  return math.max(measures[name].weight, 0.001)
end

local function drop(run, step, used)
  local held = grant_of(run)
  if not held or held.step ~= step then return 'none' end
  give(held, used or held.amounts)
  set_grant(run, false)
  return 'done'
end

-- Whether the run still waits for that step: it may have requested another one since, or have a later grant.
local function is_current(e)
  local place = e and redis.call('HGET', waiting_key, e.run)
  if not place or string.match(place, '^%d+') ~= tostring(e.step) then return false end
  local held = grant_of(e.run)
  if not held then return true end
  if held.step < e.step then
    drop(e.run, held.step)
    return true
  end
  redis.call('HDEL', waiting_key, e.run)
  return false
end

-- The first entry of a flow that still waits.
local function head_of(flow, line)
  while looks > 0 do
    looks = looks - 1
    local text = redis.call('LINDEX', flow, 0)
    if not text then return nil end
    local e = decoded(text)
    if is_current(e) then return e end
    redis.call('LPOP', flow)
    count(line, -1)
  end
end

local function candidates(line, tenant)
  local key = flows_key(line, tenant)
  local flows = redis.call('ZRANGE', key, 0, MOST_FLOWS - 1)
  if #flows == MOST_FLOWS then
    local known = {}
    for _, flow in ipairs(flows) do known[flow] = true end
    for _, flow in ipairs(redis.call('ZRANGEBYSCORE', key, 2 * CLASS, '+inf', 'LIMIT', 0, MOST_BLOCKED)) do
      if not known[flow] then flows[#flows + 1] = flow end
    end
  end
  local begun, fresh = {}, {}
  for _, flow in ipairs(flows) do
    local into = class_of(flow) == 0 and begun or fresh
    into[#into + 1] = flow
  end
  for _, flow in ipairs(fresh) do begun[#begun + 1] = flow end
  return begun
end

-- Whether a limit belongs to the whole line: then nobody of it can be admitted.
local function is_shared(line, name) return name == line or not EACH[string.match(name, '^(%a+):')] end

-- Admits the next step of a tenant. Returns the entry; or nil, and whether the whole line is blocked.
local function next_of(line, turn)
  local at = 1
  while turn.flows[at] and looks > 0 do
    local flow = turn.flows[at]
    local e = head_of(flow, line)
    local name, ms, kind
    if e then
      load(e.names)
      name, ms, kind = blocked_by(e.names, e.amounts)
      if name then
        states[line].why, touched[line] = name .. ' ' .. kind, true
        if ms >= 0 then soon(ms) end
        if is_shared(line, name) then return nil, true end
        redis.call('ZADD', turn.key, 2 * CLASS + now, flow)
      else
        redis.call('LPOP', flow)
        if redis.call('EXISTS', flow) == 0 then
          redis.call('ZREM', turn.key, flow)
          table.remove(turn.flows, at)
        else
          redis.call('ZADD', turn.key, class_of(flow) + now, flow)
        end
        return e
      end
    elseif redis.call('EXISTS', flow) == 0 then
      redis.call('ZREM', turn.key, flow)
    end
    table.remove(turn.flows, at)
  end
  return nil, looks <= 0
end

-- Start-time fair queueing: who has had least, by weight, is next.
local function admit(line)
  load({ line })
  local turns = {}
  local found = redis.call('ZRANGE', tenants_key(line), 0, MOST_TENANTS - 1, 'WITHSCORES')
  for i = 1, #found, 2 do
    turns[#turns + 1] = { tenant = found[i], v = tonumber(found[i + 1]), key = flows_key(line, found[i]) }
  end
  local latest = turns[#turns] and turns[#turns].v or 0
  while #turns > 0 do
    if #admitted >= 3 * MOST_ADMITTED or looks <= 0 then return soon(0) end
    local best = 1
    for i, turn in ipairs(turns) do if turn.v < turns[best].v then best = i end end
    local turn = turns[best]
    turn.flows = turn.flows or candidates(line, turn.tenant)
    local e, is_over = next_of(line, turn)
    if e then
      e.why = e.why or states[line].why
      grant(e)
      redis.call('HDEL', waiting_key, e.run)
      count(line, -1)
      was_admitted[e.run] = e.step
      dispatch(e)
      states[line].v = math.max(tonumber(states[line].v) or 0, turn.v)
      turn.v = turn.v + cost_of(line, e.amounts) / weight_of(turn.tenant)
      latest = math.max(latest, turn.v)
      if #turn.flows == 0 and redis.call('EXISTS', turn.key) == 0 then
        leave(line, turn.tenant, turn.v)
        table.remove(turns, best)
      else
        redis.call('ZADD', tenants_key(line), turn.v, turn.tenant)
      end
    elseif is_over then
      return
    else
      if redis.call('EXISTS', turn.key) == 0 then
        leave(line, turn.tenant, turn.v)
      else
        redis.call('ZADD', tenants_key(line), math.max(turn.v, latest), turn.tenant)
      end
      table.remove(turns, best)
    end
  end
end

-- ------------------------------------------------------------------ operations

local function ask(op)
  local held = grant_of(op.run)
  if held and held.step == op.step then
    held.till, held.again = now + lease, nil
    set_grant(op.run, held)
    if op.op ~= 'try' then dispatch(held) end
    return 'granted'
  end
  if held and held.step > op.step then return 'stale' end -- a late repetition
  if held then drop(op.run, held.step) end
  local e = { run = op.run, step = op.step, agent = op.agent, tenant = op.tenant, fresh = op.fresh, names = op.names,
    amounts = op.amounts, since = now }
  local line = e.names[1]
  load(e.names)
  if waiting_total > 0 then
    local place = redis.call('HGET', waiting_key, e.run)
    if place and string.match(place, '^%d+') == tostring(e.step) then return 'waits' end
    if place and tonumber(string.match(place, '^%d+')) > e.step then return 'stale' end
    if place then redis.call('HDEL', waiting_key, e.run) end
  end
  local name, ms, kind = blocked_by(e.names, e.amounts)
  if (counts[line] or 0) == 0 and not name then
    grant(e)
    if op.op ~= 'try' then dispatch(e) end
    return 'granted'
  end
  if op.op == 'try' then return 'full' end
  if name then
    e.why = name .. ' ' .. kind
    if ms >= 0 then soon(ms) end
  end
  wait_in_line(e, op.op == 'again')
  return 'waits'
end

local function charge(op)
  for _, name in ipairs(op.names) do
    local s, m = states[name], measures[name]
    for kind in pairs(m.rates) do s[kind] = s[kind] - amount(op.amounts, kind) end
    touched[name] = true
  end
  return 'done'
end

-- A refusal that comes beside others of one moment counts once; without a wish of the provider waits grow.
local function throttled(op)
  local name = op.names[1]
  load({ name })
  local s = states[name]
  local cool = tonumber(s.cool) or 0
  if cool <= now then s.waves = now - cool < 60000 and (tonumber(s.waves) or 0) + 1 or 1 end
  local ms = tonumber(op.ms) or math.min(500 * 2 ^ (s.waves or 1), 30000)
  s.cool = math.max(cool, now + math.min(ms, 3600000))
  s.refused = (tonumber(s.refused) or 0) + 1
  touched[name] = true
  return 'done'
end

-- Forgets levels that nobody has changed for long: they are full. Without grants no call is in flight.
local function look_at_levels(state, size)
  local page = redis.call('HSCAN', KEYS[1], state.levels or '0', 'COUNT', 50)
  state.levels = page[1]
  for i = 1, #page[2], 2 do
    local name, s = page[2][i], decoded(page[2][i + 1]) or {}
    local at = tonumber(s.at)
    if at and size == 0 and (s.f or 0) > 0 then
      load({ name })
      states[name].f, touched[name] = 0, true
    elseif at and (s.f or 0) == 0 and now - at > IDLE and not s.learned and not s.spent and (tonumber(s.cool) or 0) < now then
      redis.call('HDEL', KEYS[1], name)
    end
  end
end

-- Looks through some of the grants. One that nobody renews is dispatched once more: its hint may be lost, or its
-- worker. If that helps nobody, its step waits in line again: whoever claims it there decides what is left of it.
local function look_at_grants(state)
  if now - (tonumber(state.swept) or 0) < TURN / 2 and (tonumber(state.swept) or 0) <= now then return end
  local size = redis.call('HLEN', grants_key)
  look_at_levels(state, size)
  local most = math.min(math.max(100, math.floor(size / 16)), 500)
  local page = redis.call('HSCAN', grants_key, state.cursor or '0', 'COUNT', most)
  state.cursor, state.swept = page[1], now
  for i = 1, #page[2], 2 do
    local run = page[2][i]
    local held = grant_of(run)
    if held and held.till < now then
      if not held.again then
        held.again, held.till = true, now + lease
        set_grant(run, held)
        dispatch(held)
      else
        give(held, {})
        set_grant(run, false)
        wait_in_line({ run = run, step = held.step, agent = held.agent, tenant = held.tenant, fresh = held.fresh,
          names = held.names, amounts = held.amounts, since = now }, true)
      end
    end
  end
end

-- ------------------------------------------------------------------ the call

local ops = cjson.decode(ARGV[3])
local found = redis.call('ZRANGE', lines_key, 0, -1, 'WITHSCORES')
for i = 1, #found, 2 do
  counts[found[i]] = tonumber(found[i + 1])
  waiting_total = waiting_total + counts[found[i]]
end
local runs, names = {}, {}
for _, op in ipairs(ops) do
  if op.run then runs[#runs + 1] = op.run end
  for _, name in ipairs(op.names or {}) do names[#names + 1] = name end
end
if #runs > 0 then
  for i, text in ipairs(redis.call('HMGET', grants_key, unpack(runs))) do
    grants[runs[i]] = decoded(text) or false
    for _, name in ipairs(grants[runs[i]] and grants[runs[i]].names or {}) do names[#names + 1] = name end
  end
end
load(names)
local turn_text = redis.call('HMGET', KEYS[1], '*', '*turn')
local own = decoded(turn_text[1]) or {}
local results = {}
for i, op in ipairs(ops) do
  if op.op == 'try' or op.op == 'ask' or op.op == 'again' then
    results[i] = ask(op)
  elseif op.op == 'settle' then
    results[i] = drop(op.run, op.step, op.amounts)
  elseif op.op == 'refund' then
    results[i] = drop(op.run, op.step, {})
  elseif op.op == 'throttled' then
    results[i] = throttled(op)
  elseif op.op == 'charge' then
    results[i] = charge(op)
  elseif op.op == 'renew' then
    local held = grant_of(op.run)
    results[i] = 'none'
    if held and held.step == op.step then
      held.till, held.again = now + lease, nil
      set_grant(op.run, held)
      results[i] = 'done'
    end
  else
    look_at_grants(own)
    results[i] = 'done'
  end
end
-- Where there are more lines than one call looks at, the next call goes on behind them.
local lines, first = {}, tonumber(own.line) or 0
for line, size in pairs(counts) do if size > 0 then lines[#lines + 1] = line end end
table.sort(lines)
for i = 1, math.min(#lines, MOST_LINES) do admit(lines[(first + i - 1) % #lines + 1]) end
own.line = #lines > MOST_LINES and (first + MOST_LINES) % #lines or nil
if #lines > MOST_LINES then soon(0) end
for i, op in ipairs(ops) do
  if results[i] == 'waits' and was_admitted[op.run] == op.step then results[i] = 'granted' end
end

-- Who comes back first has the turn, as long as it comes.
local turn = decoded(turn_text[2]) or {}
local mine, had = 0, turn.who == caller
local at = waiting_total > 0 and next_ms and now + math.min(next_ms, TURN) or now + TURN
if had or not turn.at or turn.at + SECOND_LIFE < now or turn.at > now + 10 * SECOND_LIFE
  or (waiting_total > 0 and next_ms and at + SOON < turn.at) then
  turn, mine = { who = caller, at = at }, 1
end

-- ------------------------------------------------------------------ writes

local changes = { '*turn', cjson.encode(turn), '*', cjson.encode(own) }
for name in pairs(touched) do
  changes[#changes + 1] = name
  changes[#changes + 1] = cjson.encode(states[name])
end
redis.call('HSET', KEYS[1], unpack(changes))
local held, gone = {}, {}
for run in pairs(grants_changed) do
  if grants[run] then
    held[#held + 1] = run
    held[#held + 1] = cjson.encode(grants[run])
  else
    gone[#gone + 1] = run
  end
end
for i = 1, #held, 1000 do redis.call('HSET', grants_key, unpack(held, i, math.min(i + 999, #held))) end
for i = 1, #gone, 1000 do redis.call('HDEL', grants_key, unpack(gone, i, math.min(i + 999, #gone))) end
for line in pairs(counts_changed) do
  if counts[line] > 0 then
    redis.call('ZADD', lines_key, counts[line], line)
  else
    redis.call('ZREM', lines_key, line)
  end
end
local version = redis.call('HGET', settings_key, 'version')
return { results, admitted, waiting_total > 0 and next_ms or -1, waiting_total, version or '', mine }
