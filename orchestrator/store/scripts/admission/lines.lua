-- Second part of admit.lua: steps that wait, and who is next.
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

