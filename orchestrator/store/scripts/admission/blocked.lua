-- Third part of admit.lua: who waits for room under which limit. A call looks only at lines where something may have
-- changed: a step came, a call ended, or time has passed; its work does not grow with the number of names that wait.
--   blocked:NAME   lines ('L...') and flows ('F...') that NAME has no room for, by the time since which they are in vain
--   when           each NAME that somebody is blocked by, by the ms at which it may have room; FAR: when a call ends
--   every          all flows: where one is in no other key, that was lost
--   ready          lines that the next call has to look at: this one did not get to their end
-- Who changes a level for the better, or its limit, sets `freed[name]`.
local when_key, ready_key, every_key = prefix .. 'when', prefix .. 'ready', prefix .. 'every'
local MOST_WOKEN, MOST_WOKEN_IN_ALL, MOST_DUE, PAGE = 16, 256, 32, 64
local FAR = 8 * CLASS
local ONE = { r = 1 }
local due, woke, woken, times, in_vain, blocks, was_ready = {}, {}, {}, {}, {}, {}, {}
local woken_in_all, is_ready = 0, false
local queue, queued = {}, {}

local function blocked_key(name) return prefix .. 'blocked:' .. name end
local function tenants_key(line) return prefix .. 'tenants:' .. line end
local function left_key(line) return prefix .. 'left:' .. line end
local function flows_key(line, tenant) return prefix .. 'flows:' .. line .. SEP .. tenant end

-- Steps of one tenant with the same limits and of one class are one flow: first come, first served. Classes: begun and
-- fresh runs of high priority are 0 and 1, of normal 2 and 3, of low 4 and 5.
local function flow_of(e)
  return prefix .. 'flow:' .. (e.class or 2) .. e.names[1] .. SEP .. e.tenant .. SEP .. table.concat(e.names, SEP)
end
local function class_of(flow) return tonumber(string.sub(flow, #prefix + 6, #prefix + 6)) * CLASS end

local function look_at(line)
  if not queued[line] then queue[#queue + 1], queued[line] = line, true end
end

-- A tenant that begins to wait starts where the others are: idling earns nothing, and leaving a line and coming back
-- loses no debt.
local function enter(line, tenant)
  local key = tenants_key(line)
  if redis.call('ZSCORE', key, tenant) then return end
  load({ line })
  local first = redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')
  local at = tonumber(first[2]) or tonumber(states[line].v) or 0
  local left = tonumber(redis.call('ZSCORE', left_key(line), tenant)) or 0
  redis.call('ZADD', key, math.max(at, left), tenant)
  redis.call('ZREM', left_key(line), tenant)
end

-- Makes a flow one that may be admitted.
local function open(flow, line, tenant)
  redis.call('ZADD', flows_key(line, tenant), class_of(flow) + now, flow)
  enter(line, tenant)
end

local function at_time(name, ms)
  local at = ms >= 0 and now + ms or FAR
  times[name] = math.min(times[name] or FAR, at)
end

-- Has a line or a flow wait for room under a limit. Who was looked at in vain keeps its place there.
local function block(name, member, ms)
  at_time(name, ms)
  if in_vain[name .. SEP .. member] then return end
  in_vain[name .. SEP .. member], blocks[name] = true, true
  redis.call('ZADD', blocked_key(name), 'NX', woken[member] or now, member)
end

-- Looks again at those that a limit has blocked, first those that have waited longest.
local function wake(name)
  woke[name] = true
  local room, ms = fits(name, ONE)
  if not room then return at_time(name, ms) end
  local key = blocked_key(name)
  local found = redis.call('ZRANGE', key, 0, MOST_WOKEN - 1, 'WITHSCORES')
  if #found == 0 then
    woke[name] = nil
    if due[name] then redis.call('ZREM', when_key, name) end
    return
  end
  redis.call('ZREMRANGEBYRANK', key, 0, MOST_WOKEN - 1)
  for i = 1, #found, 2 do
    local kind, rest = string.sub(found[i], 1, 1), string.sub(found[i], 2)
    woken[found[i]], in_vain[name .. SEP .. found[i]] = tonumber(found[i + 1]), nil
    woken_in_all = woken_in_all + 1
    if kind == 'F' then
      local line, tenant = string.match(string.sub(rest, #prefix + 7), '^([^' .. SEP .. ']*)' .. SEP .. '([^' .. SEP .. ']*)')
      open(rest, line, tenant)
      rest = line
    end
    look_at(rest)
  end
end

local function wake_freed()
  local names = {}
  for name in pairs(freed) do names[#names + 1] = name end
  load(names)
  for _, name in ipairs(names) do
    if woken_in_all >= MOST_WOKEN_IN_ALL then return end
    freed[name] = nil
    wake(name)
  end
end

-- Looks at some of those that wait as if there were room: somebody has changed the limits, or a key is lost.
local function look_at_blocked(state)
  local page = redis.call('ZSCAN', when_key, state.names or '0', 'COUNT', PAGE)
  state.names = page[1]
  for i = 1, #page[2], 2 do freed[page[2][i]], due[page[2][i]] = true, true end
end
local function look_around(state)
  look_at_blocked(state)
  local page = redis.call('ZSCAN', lines_key, state.lines or '0', 'COUNT', PAGE)
  state.lines = page[1]
  for i = 1, #page[2], 2 do look_at(page[2][i]) end
end

-- Whoever has to be looked at, in this call: time has passed, limits have changed, or the call before had too much.
local function begin_looks(state, version)
  local ready = redis.call('ZRANGE', ready_key, 0, MOST_LINES - 1)
  is_ready = #ready == MOST_LINES
  for _, line in ipairs(ready) do
    was_ready[line] = true
    look_at(line)
  end
  for _, name in ipairs(redis.call('ZRANGEBYSCORE', when_key, '-inf', now, 'LIMIT', 0, MOST_DUE)) do
    freed[name], due[name] = true, true
  end
  if state.version ~= version then state.version, state.changed, state.names = version, true, nil end
  if state.changed then
    look_at_blocked(state)
    if state.names == '0' then state.changed = nil else soon(0) end
  end
end

-- The next call looks at the line, after all others if this one did, too.
local function look_later(line, was_looked_at)
  is_ready = true
  if was_looked_at then redis.call('ZREM', ready_key, line) end
  redis.call('ZADD', ready_key, 'NX', now, line)
end

-- Writes who has to be looked at later, and when.
local function end_looks(from)
  for at = from, #queue do
    if queued[queue[at]] and not was_ready[queue[at]] then look_later(queue[at]) end
  end
  for name in pairs(freed) do times[name], woke[name] = now, true end
  for name in pairs(woke) do
    if not blocks[name] and redis.call('EXISTS', blocked_key(name)) == 0 then
      redis.call('ZREM', when_key, name)
      times[name] = nil
    elseif not times[name] then
      times[name] = now
    end
  end
  for name, at in pairs(times) do
    local known = not woke[name] and tonumber(redis.call('ZSCORE', when_key, name))
    if not known or known > at then redis.call('ZADD', when_key, at, name) end
  end
  local first = tonumber(redis.call('ZRANGE', when_key, 0, 0, 'WITHSCORES')[2])
  if first and first < FAR then soon(math.max(first - now, 0)) end
  if is_ready then soon(0) end
end
