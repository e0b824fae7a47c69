-- Fourth part of admit.lua: steps that wait, and who is next.
local MOST_COUNTED, LOWEST = 1000, 2

-- Whether a limit belongs to the whole line: then nobody of it can be admitted.
local function is_shared(line, name) return name == line or not EACH[string.match(name, '^(%a+):')] end

local function leave(line, tenant, at)
  redis.call('ZREM', tenants_key(line), tenant)
  redis.call('ZREMRANGEBYSCORE', left_key(line), '-inf', tonumber(states[line].v) or 0)
  redis.call('ZADD', left_key(line), at, tenant)
end

-- A flow that is in `every` was lost, and its runs have places: all that wait since before ask once more (see ask). Those
-- that are in a list keep their place there. Beyond MOST_COUNTED flows the line stays too long until it is empty.
local function lose(line)
  own.lost = now - 1
  if redis.call('SCARD', every_key) > MOST_COUNTED then return end
  local size = 0
  for _, flow in ipairs(redis.call('SMEMBERS', every_key)) do
    if string.match(string.sub(flow, #prefix + 7), '^[^' .. SEP .. ']*') == line then size = size + redis.call('LLEN', flow) end
  end
  count(line, size - count_of(line))
end

-- `name` is the limit that has no room for it, for `ms`; without one somebody looks at it in this call.
local function wait_in_line(e, head, name, ms)
  local flow, line = flow_of(e), e.names[1]
  local size = redis.call(head and 'LPUSH' or 'RPUSH', flow, cjson.encode(e))
  local is_new = redis.call('SADD', every_key, flow) == 1
  if size == 1 and not is_new then
    lose(line)
    count(line, -1) -- it is counted below
  end
  local is_first = is_new or head
  local shared = name and is_shared(line, name)
  redis.call('HSET', waiting_key, e.run, e.step .. ' ' .. e.since .. ' ' .. (e.why or ''))
  count(line, 1)
  if name and not shared then
    if is_first then block(name, 'F' .. flow, ms) end
    return
  end
  if is_first then open(flow, line, e.tenant) end
  if shared then block(name, 'L' .. line, ms) else look_at(line) end
end

local function grant(e)
  budget.fix(e.amounts)
  local reserved = take(e.names, e.amounts)
  set_grant(e.run, { run = e.run, step = e.step, agent = e.agent, tenant = e.tenant, class = e.class,
    names = e.names, amounts = e.amounts, n = round, till = now + lease, waited = now - e.since, why = e.why,
    crashes = e.crashes, of = e.of, key = e.key, b = reserved })
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

local function drop(run, step, used, spent)
  local held = grant_of(run)
  if not held or held.step ~= step then return 'none' end
  give(held, used or held.amounts, spent)
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

-- The first entry of a flow that still waits. Without one, whether the flow had none at all.
local function head_of(flow, line)
  local was_empty = true
  while looks > 0 do
    looks = looks - 1
    local text = redis.call('LINDEX', flow, 0)
    if not text then return nil, was_empty end
    was_empty = false
    local e = step_of(text)
    if is_current(e) then return e end
    redis.call('LPOP', flow)
    count(line, -1)
  end
end

-- Forgets a flow in which nobody waits any more. With `line`, nobody has emptied it: it was lost.
local function is_over(flow, flows, line)
  if redis.call('EXISTS', flow) == 1 then return false end
  redis.call('ZREM', flows, flow)
  if redis.call('SREM', every_key, flow) == 1 and line then lose(line) end
  return true
end

-- The flows of a tenant, by class. One admission in FAIR begins with a lower priority that waits, two of them in
-- turn (`fair`: the last one): none waits for ever.
local function flows_of(line, turn)
  local flows = redis.call('ZRANGE', turn.key, 0, MOST_FLOWS - 1)
  local s = states[line]
  if flows[2] and (tonumber(s.turns) or 0) >= FAIR - 1 then
    local first, of
    for priority = LOWEST, math.floor(class_of(flows[1]) / CLASS / 2) + 1, -1 do
      local least, most = 2 * priority * CLASS, 2 * (priority + 1) * CLASS - 1
      local found = redis.call('ZRANGEBYSCORE', turn.key, least, most, 'LIMIT', 0, 1)[1]
      if found and (not first or of == s.fair) then first, of = found, priority end
    end
    if first then
      for i = #flows, 1, -1 do if flows[i] == first then table.remove(flows, i) end end
      table.insert(flows, 1, first)
      turn.is_fair = of
    end
  end
  return flows
end

-- Admits the next step of a tenant. Returns the entry; or nil, and whether the whole line is blocked, or has to wait
-- for the next call.
local function next_of(line, turn)
  local at = 1
  while turn.flows[at] and looks > 0 do
    local flow = turn.flows[at]
    local e, was_empty = head_of(flow, line)
    local name, ms, kind
    if e then
      load(e.names)
      e.over = budget.over(e.names, e.amounts)
      if not e.over then name, ms, kind = blocked_by(e.names, e.amounts) end
      if name then
        states[line].why, touched[line] = name .. ' ' .. kind, true
        if kind == 'r' then learn.hold_up(name) end
        if is_shared(line, name) then
          block(name, 'L' .. line, ms)
          return nil, 'blocked'
        end
        redis.call('ZREM', turn.key, flow)
        block(name, 'F' .. flow, ms)
      else
        redis.call('LPOP', flow)
        woken['L' .. line], woken['F' .. flow] = nil, nil
        if is_over(flow, turn.key) then
          table.remove(turn.flows, at)
        else
          redis.call('ZADD', turn.key, class_of(flow) + now, flow)
        end
        return e
      end
    else
      is_over(flow, turn.key, was_empty and line)
    end
    table.remove(turn.flows, at)
  end
  return nil, looks <= 0 and 'later'
end

-- What the line has waited for, where that is a limit of this step too.
local function why_of(line, e)
  local why = states[line].why
  for _, name in ipairs(e.names) do
    if why and string.match(why, '^(.*) ') == name then return why end
  end
end

local function pass_turn(line, turn)
  local s = states[line]
  s.turns = turn.is_fair and 0 or math.min((tonumber(s.turns) or 0) + 1, FAIR)
  s.fair = turn.is_fair or s.fair
  touched[line] = true
  if turn.is_fair or s.turns == FAIR - 1 then turn.flows, turn.is_fair = nil, nil end
end

-- Start-time fair queueing: who has had least, by weight, is next. Returns whether there is more to look at.
local function admit(line)
  load({ line })
  local turns, is_more = {}, false
  local found = redis.call('ZRANGE', tenants_key(line), 0, MOST_TENANTS - 1, 'WITHSCORES')
  for i = 1, #found, 2 do
    turns[#turns + 1] = { tenant = found[i], v = tonumber(found[i + 1]), key = flows_key(line, found[i]) }
  end
  local latest = turns[#turns] and turns[#turns].v or 0
  is_more = #turns == MOST_TENANTS
  while #turns > 0 do
    local room, ms, kind = fits(line, ONE)
    if not room then
      states[line].why, touched[line] = line .. ' ' .. kind, true
      if kind == 'r' then learn.hold_up(line) end
      block(line, 'L' .. line, ms)
      return false
    end
    if #admitted >= 3 * MOST_ADMITTED or looks <= 0 then return true end
    local best = 1
    for i, turn in ipairs(turns) do if turn.v < turns[best].v then best = i end end
    local turn = turns[best]
    turn.flows = turn.flows or flows_of(line, turn)
    local e, ended = next_of(line, turn)
    if e then
      if not e.why or string.sub(e.why, -2) == ' w' then e.why = why_of(line, e) or e.why end
      if not e.over then grant(e) end
      pass_turn(line, turn)
      redis.call('HDEL', waiting_key, e.run)
      count(line, -1)
      was_admitted[e.run] = e.step
      dispatch(e)
      states[line].v = math.max(tonumber(states[line].v) or 0, turn.v)
      if not e.over then turn.v = turn.v + cost_of(line, e.amounts) / weight_of(turn.tenant) end
      latest = math.max(latest, turn.v)
      if (not turn.flows or #turn.flows == 0) and redis.call('EXISTS', turn.key) == 0 then
        leave(line, turn.tenant, turn.v)
        table.remove(turns, best)
      else
        redis.call('ZADD', tenants_key(line), turn.v, turn.tenant)
      end
    elseif ended then
      return ended == 'later'
    else
      if redis.call('EXISTS', turn.key) == 0 then
        leave(line, turn.tenant, turn.v)
      else
        redis.call('ZADD', tenants_key(line), math.max(turn.v, latest), turn.tenant)
        is_more = true
      end
      table.remove(turns, best)
    end
  end
  return is_more
end

