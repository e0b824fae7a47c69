-- Decides which steps may make their model calls: the only place that does. KEYS[1] the state of the limits;
-- the other keys, all on its slot, are named after it. ARGV[1] the caller's name, ARGV[2] ms for which a grant
-- holds without a renewal, ARGV[3] operations (JSON), each {op, ...}, `repeated` where it may have been applied before:
--   try, ask, again   run, step, agent, tenant, class, names, amounts: a grant now, or nothing (try), or a place
--                     in the line (at its head: again). `names` are the limits of the call, the first is its line
--                     `crashes` workers were lost with the step; with `lost` the last of them is not charged yet
--                     `of` names the model where it is not the agent's first: another grant of the same step is for other
--                     calls, and is ended: as `ended` says (like settle), without that as it was reserved
--                     `key` tells its grant from others of the step: what ends a grant names it
--   settle, refund    run, step, amounts: ends a grant; the difference to what was reserved is charged, or all given back,
--                     then a place in the line too, as where there is no grant any more
--                     `spent` of budgets; `names` where there may be no grant any more; with `other` the caller did not use
--                     the grant, and whoever did may settle it yet
--   lost              run, step, crashes: workers that were lost with that step may have made its call: its grant ends
--   renew             run, step: a grant of a step that is under way goes on
--   charge            names, amounts, spent: what was made under other limits than its step's grant has
--   base              names (one), all, day, today: what the ledger has of it (see budgets.lua)
--   throttled         names, ms, age, sent, secs, said: the provider refused a call of the model that is named; nobody
--                     calls it for so long (see learning.lua)
--   headers           names, said, left, make: limits per minute by kind, and what is left, as the model's answers state
--                     them; without `make` only where the model has a limit
--   tick              looks for grants that nobody renews
--   unsound           why: it could not be written
-- An `id` marks an operation that would add up when it is repeated.
-- Returns { a word per operation ('failed: ...' for one that failed alone), admitted, next, waiting, version, mine, missing }: `admitted` (run, step, agent, ...) are to
-- be dispatched by the caller, also those that it requested itself; after `next` ms something may be admitted (-1: only when
-- a call ends); `waiting` steps wait in all; with `mine` the caller is to come back by then, else somebody else will.
-- Calls of the names `missing` wait for their `base`. A step whose budget is spent is dispatched without a grant: whoever
-- claims it tries, gets 'over <which>', and ends its run.
--
-- A grant holds `r` requests, `i` and `o` tokens and `s` starts of every limit that it names, and one call in flight.
-- Rates are buckets that fill with time: a bucket may be overdrawn by one request that is larger than it, and by what
-- an estimate lacked. Budgets (u, k, n, a) have their own part.
-- Invariants: a run has one grant, or one place in a line, of one step; who is in neither asks again when dispatched.

-- Lost workers may have paid for a step's call: each counts once, as it was estimated. The grant was for the last of
-- them: the call in its place needs another one, and its request does not charge the loss again.
local act, charged = {}, {} -- `act` has what each operation does
function act.lost(op)
  local held = grant_of(op.run)
  if not held or held.step ~= op.step then return 'none' end
  local times = op.crashes - (held.crashes or 0)
  if times <= 0 then return 'none' end
  load(held.names)
  for _, name in ipairs(held.names) do budget.spend(name, held.amounts, times - 1) end
  charged[op.run] = true
  return drop(op.run, op.step)
end

local ends = {}

-- Whether an operation was applied before: its reply was lost.
function ends.is_done(op)
  return op.id and not redis.call('SET', prefix .. 'done:' .. op.id, '1', 'NX', 'EX', 300)
end

function ends.leave_line(run, step)
  if lines_total > 0 and string.match(redis.call('HGET', waiting_key, run) or '', '^%d+') == tostring(step) then
    redis.call('HDEL', waiting_key, run)
  end
end

-- Ends the grant of an operation, and none that the step got since.
function ends.end_grant(op, used, spent)
  local held = grant_of(op.run)
  if held and op.key and held.key and held.key ~= op.key then return 'none' end
  return drop(op.run, op.step, used, spent)
end

-- What a settlement spends whose grant is gone: somebody has wiped the grants, or has ended this one as it was reserved.
function ends.left_to_spend(op)
  local before = op.key and decoded(redis.call('GET', prefix .. 'ended:' .. op.key) or nil)
  if not before then return op.spent end
  local left = {}
  for _, kind in ipairs(QUOTA_KINDS) do left[kind] = (tonumber(op.spent[kind]) or 0) - (tonumber(before[kind]) or 0) end
  return left
end

-- A call whose grant is gone is spent all the same; not where this may be the repetition of a settlement whose reply was
-- lost.
function act.settle(op)
  local held = grant_of(op.run)
  local word = ends.end_grant(op, op.amounts, op.spent)
  if word == 'done' then budget.see(held, op.spent) end
  if word == 'none' and not op.repeated then
    local spent = op.spent and ends.left_to_spend(op)
    for _, name in ipairs(spent and op.names or {}) do budget.spend(name, spent) end
    ends.leave_line(op.run, op.step)
  elseif word == 'done' and op.other and held.key then
    redis.call('SET', prefix .. 'ended:' .. held.key, cjson.encode(held.amounts), 'EX', 300)
  end
  return word
end

function act.refund(op)
  local word = ends.end_grant(op, {})
  if not op.repeated then ends.leave_line(op.run, op.step) end
  return word
end

-- Ends the grant of an earlier call of the step, to another model.
function ends.turn_to_model(op)
  local held = grant_of(op.run)
  if held and held.step == op.step and held.of == op.of then return end
  if op.ended then
    op.ended.repeated = op.repeated
    act.settle(op.ended)
  elseif held and held.step == op.step then
    drop(op.run, op.step)
  end
end

function act.ask(op)
  ends.turn_to_model(op)
  local held = grant_of(op.run)
  if held and held.step == op.step then
    held.till, held.again, held.key = now + lease, nil, op.key
    set_grant(op.run, held)
    if op.op ~= 'try' then dispatch(held) end
    return 'granted'
  end
  if held and held.step > op.step then return 'stale' end -- a late repetition
  if held then drop(op.run, held.step) end
  if op.amounts.m then op.amounts.m.of = op.agent end
  local e = { run = op.run, step = op.step, agent = op.agent, tenant = (string.gsub(op.tenant, SEP, '?')), class = op.class,
    names = op.names, amounts = op.amounts, since = now, crashes = op.crashes, of = op.of,
    key = op.key }
  local line = e.names[1]
  load(e.names)
  if op.lost and not charged[op.run] and not ends.is_done(op) then
    for _, name in ipairs(e.names) do budget.spend(name, e.amounts) end
  end
  local over = budget.over(e.names, e.amounts)
  if over then
    redis.call('HDEL', waiting_key, e.run)
    if op.op ~= 'try' then dispatch(e) end
    return over
  end
  if lines_total > 0 then
    local place = redis.call('HGET', waiting_key, e.run)
    local step, since = string.match(place or '', '^(%d+) (%d+)')
    -- The entry of a run that waits since before a loss may be gone; of two the first one counts.
    if step == tostring(e.step) and tonumber(since) > (own.lost or 0) then return 'waits' end
    if step and tonumber(step) > e.step then return 'stale' end
    if place then redis.call('HDEL', waiting_key, e.run) end
  end
  local name, ms, kind = blocked_by(e.names, e.amounts)
  if count_of(line) == 0 and not name then
    learn.look(line)
    grant(e)
    if op.op ~= 'try' then dispatch(e) end
    return 'granted'
  end
  if op.op == 'try' then return 'full' end
  if name then states[line].why, touched[line] = name .. ' ' .. kind, true end
  e.why = states[line].why
  wait_in_line(e, op.op == 'again', name, ms)
  return 'waits'
end

function act.charge(op)
  if ends.is_done(op) then return 'done' end
  for _, name in ipairs(op.names) do
    local s, m = states[name], measures[name]
    for kind in pairs(m.rates) do s[kind] = s[kind] - amount(op.amounts or {}, kind) end
    if op.spent then budget.spend(name, op.spent) end
    touched[name] = true
  end
  return 'done'
end

-- Forgets levels that nobody has changed for long: they are full. Without grants no call is in flight.
local function look_at_levels(state, size)
  local page = redis.call('HSCAN', KEYS[1], state.levels or '0', 'COUNT', 50)
  state.levels = page[1]
  for i = 1, #page[2], 2 do
    local name, s = page[2][i], decoded(page[2][i + 1]) or {}
    local at = tonumber(s.at)
    if s.l then learn.is_known(name) end
    if at and (s.f or 0) > 0 and (size == 0 or s.n ~= round) then
      load({ name })
      touched[name], freed[name] = true, true
      if size == 0 then states[name].f, states[name].c, states[name].h = 0, 0, nil end
    elseif at and (s.f or 0) == 0 and now - at > IDLE and not (states[name] or s).l and not s.spent and (tonumber(s.cool) or 0) < now then
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
  if state.budgets then look_at_budgets(state, size) end
  local most = math.min(math.max(100, math.floor(size / 16)), 500)
  local page = redis.call('HSCAN', grants_key, state.cursor or '0', 'COUNT', most)
  state.cursor, state.swept = page[1], now
  if lines_total > 0 then look_around(state) end
  if lines_total > 0 or redis.call('EXISTS', waiting_key) == 1 then repair(state) end
  for i = 1, #page[2], 2 do
    local run = page[2][i]
    if grants[run] == nil then
      grants[run] = step_of(page[2][i + 1]) or false
      if not grants[run] then set_grant(run, false) end
    end
    local held = grants[run]
    if held then confirm(run, held) end
    if held and (tonumber(held.till) or 0) < now then
      if not held.again then
        held.again, held.till = true, now + lease
        set_grant(run, held)
        dispatch(held)
      else
        give(held, {})
        set_grant(run, false)
        if not held.of then -- the next owner begins with the agent's first model
          wait_in_line({ run = run, step = held.step, agent = held.agent, tenant = held.tenant, class = held.class,
            names = held.names, amounts = held.amounts, since = now, crashes = held.crashes, key = held.key }, true)
        end
      end
    end
  end
  end_round(state, page[1])
end

function act.renew(op)
  local held = grant_of(op.run)
  if not held or held.step ~= op.step then return 'none' end
  held.till, held.again = now + lease, nil
  set_grant(op.run, held)
  return 'done'
end

function act.tick()
  look_at_grants(own)
  return 'done'
end

-- ------------------------------------------------------------------ the call

local ops = cjson.decode(ARGV[3])
local runs, names = {}, {}
for _, op in ipairs(ops) do
  if op.run then runs[#runs + 1] = op.run end
  for _, name in ipairs(op.names or {}) do names[#names + 1] = name end
  for _, name in ipairs(op.ended and op.ended.names or {}) do names[#names + 1] = name end
end
if #runs > 0 then
  for i, text in ipairs(redis.call('HMGET', grants_key, unpack(runs))) do
    grants[runs[i]] = step_of(text) or false
    for _, name in ipairs(grants[runs[i]] and grants[runs[i]].names or {}) do names[#names + 1] = name end
  end
end
local version, turn_text = load(names, { 'version' }, { '*', '*turn' })
local results = {}
act.try, act.again, act.base = act.ask, act.ask, base
act.throttled, act.headers = learn.throttled, learn.headers
function act.unsound(op) error(op.why, 0) end
for i, op in ipairs(ops) do
  local is_applied, word = pcall(act[op.op], op)
  results[i] = is_applied and word or 'failed: ' .. tostring(type(word) == 'table' and word.err or word)
end
local waiting_total = 0
if lines_total > 0 or #queue > 0 or next(counts_changed) then
  begin_looks(own, version or '')
  wake_freed()
  local at, most = 1, math.max(MOST_LINES, #ops)
  while queue[at] and at <= most do
    local line = queue[at]
    queued[line] = nil
    if admit(line) then
      look_later(line, true)
    elseif was_ready[line] then
      redis.call('ZREM', ready_key, line)
    end
    wake_freed()
    at = at + 1
  end
  end_looks(at)
  waiting_total = redis.call('HLEN', waiting_key)
end
for i, op in ipairs(ops) do
  local held = results[i] == 'waits' and was_admitted[op.run] == op.step and grants[op.run]
  if held then -- its place in the line had the key of an earlier request; who asks now ends it by this one
    held.key = op.key
    results[i] = 'granted'
  end
end

-- Who comes back first has the turn, as long as it comes.
local turn = decoded(turn_text) or {}
local mine, had = 0, turn.who == caller
local at = waiting_total > 0 and next_ms and now + math.min(next_ms, TURN) or now + TURN
if had or not turn.at or turn.at + SECOND_LIFE < now or turn.at > now + 10 * SECOND_LIFE
  or (waiting_total > 0 and next_ms and at + SOON < turn.at) then
  turn, mine = { who = caller, at = at }, 1
end

-- ------------------------------------------------------------------ writes

if next(changed_budgets) then
  own.budgets = 1
  write_budgets()
end
local changes = { '*turn', cjson.encode(turn), '*', cjson.encode(own) }
for name in pairs(touched) do
  changes[#changes + 1] = name
  changes[#changes + 1] = cjson.encode(states[name])
end
for i = 1, #changes, 1000 do redis.call('HSET', KEYS[1], unpack(changes, i, math.min(i + 999, #changes))) end
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
return { results, admitted, waiting_total > 0 and next_ms or -1, waiting_total, tostring(new_version or version or ''), mine,
  missing_names() }
