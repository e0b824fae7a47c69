-- In front of the scripts that let runs wait, or wake them: the header's `wait` (JSON) says why the open step does not go on.
--   reason    'delay' (before another attempt, or a first one), 'service' (it is out), 'limit' (of the fleet; `key` names it; of a
--             'delay' it says which worker could not read the run),
--             'calls' (of tools on other queues, runs, people), or 'runs' (it begins after the ends of others)
--   since     ms; deadline: ms, nobody takes the step before, unless what it waits for wakes it. 'runs' has none
--   uncounted whether the wait does not count as time of the execution
--   calls     { index, queue, tool } of each call without a result
--   outage    { since, circuits, probes } of services that are out, until a model answers
--   over      a worker has taken the step, which is open still: its calls without a result, and its outage, stay known
-- Each wait is looked at again at the run's score in `due`, which is a time.

-- Version 2 has the time, the calls ('<step> <index>:<queue>:<tool> ...'), the outage ('<since> waits|probes <circuit> ...')
-- and since when it does not count in fields of their own. A run of that version becomes one of ours when its wait changes:
-- workers of that version then leave it alone. They, and their clients, still find its time and its calls (see set_wait).
local BEFORE, OURS = '2', '3'
local EARLIER, FOR_RUNS = { 'not_before', 'waiting', 'outage', 'parked' }, 32503680000000
local function earlier_wait(key)
  local h = fields_of(key, 'step', 'updated', unpack(EARLIER))
  local deadline, calls = tonumber(h.not_before) or 0, {}
  local listed = h.step and string.match(h.waiting or '', '^' .. h.step .. '( .*)$') or ''
  for index, queue, tool in string.gmatch(listed, ' (%d+):([^:]+):(%S+)') do
    calls[#calls + 1] = { tonumber(index), queue, tool }
  end
  local since, state, ids = string.match(h.outage or '', '^(%d+) (%a+) (.*)$')
  local outage = since and { since = tonumber(since), probes = state == 'probes', circuits = {} } or nil
  for id in string.gmatch(ids or '', '%x+') do table.insert(outage.circuits, id) end
  if deadline == 0 and not calls[1] and not outage then return nil end
  local reason = deadline == FOR_RUNS and 'runs' or calls[1] and 'calls' or outage and 'service' or h.parked and 'limit'
  return { reason = reason or 'delay', since = tonumber(h.parked or h.updated),
    deadline = deadline > 0 and deadline < FOR_RUNS and deadline or nil, uncounted = h.parked and true or nil,
    calls = calls[1] and calls or nil, outage = outage, over = deadline == 0 or nil, is_earlier = true }
end

-- The wait of a run, by its header's `wait` and `v`; nil where there is none.
local function wait_of(key, text, version)
  if text then return cjson.decode(text) end
  if version == BEFORE then return seldom('earlier_wait', key) end
end

local function is_on(wait) return wait ~= nil and not wait.over end

local function set_wait(key, wait)
  if wait.is_earlier then redis.call('HSET', key, 'v', OURS) end
  wait.is_earlier = nil
  local parts = { redis.call('HGET', key, 'step') }
  for _, call in ipairs(wait.calls or {}) do parts[#parts + 1] = table.concat(call, ':') end
  redis.call('HSET', key, 'wait', cjson.encode(wait), 'waiting', parts[2] and table.concat(parts, ' ') or '',
    'not_before', string.format('%d', wait.over and 0 or wait.deadline or FOR_RUNS))
end

local function end_wait(key) redis.call('HDEL', key, 'wait', unpack(EARLIER)) end

-- A worker has the step, or is to have it.
local function leave_wait(key, wait)
  if not wait.calls and not wait.outage then return end_wait(key) end
  wait.over, wait.uncounted, wait.deadline = true, nil, nil
  set_wait(key, wait)
end
