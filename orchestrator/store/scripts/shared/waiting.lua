-- Shared by the scripts of runs that wait for tool calls on queues of their own. Follows common.lua.
--
-- The header's `waiting` is '<step> <index>:<queue>:<tool> ...': the open step's calls without a
-- result. A run waits while that step is still the run's, nobody holds the step, and `not_before`,
-- the end of its patience, is to come. The journal holds per call i: s:i how often it was started,
-- o:i its owner's token, l:i the end of the owner's lease (ms), n:i when the rescuer looks at it
-- next, c:i how many owners vanished, x:i how, y:i '<token> <n>' of an owner that is an
-- isolated process for n suspects, w:i the owner's worker, e:i ms since it was taken, r:i its result; and for the
-- step: `spent`, ms of workers' time so far, `began` (ms), `paid`, the ledger entry if the wait is ended from outside.
--
-- A call whose queue is @run, @approval or @person has no worker: k:i is the key of what it
-- waits for, t:i its time limit (ms), a:i the answer (JSON). Those that people answer are in the shard's index `asks`.
local function waits_of(text, step)
  local calls = {}
  if not text or string.match(text, '^(%d+) ') ~= tostring(step) then return calls end
  for index, rest in string.gmatch(text, ' (%d+):(%S+)') do calls[#calls + 1] = { index, rest } end
  return calls
end

local function waiting_text(step, calls)
  if #calls == 0 then return '' end
  local parts = { tostring(step) }
  for _, call in ipairs(calls) do parts[#parts + 1] = call[1] .. ':' .. call[2] end
  return table.concat(parts, ' ')
end

local function has_call(calls, index)
  for _, call in ipairs(calls) do
    if call[1] == index then return true end
  end
  return false
end

-- The earliest time at which one of the calls, or the end of the run's patience, needs attention.
local function arm(calls, patience)
  local at = patience
  for _, call in ipairs(calls) do
    at = math.min(at, number(redis.call('HGET', journal_key, 'n:' .. call[1])))
  end
  redis.call('ZADD', due_key, at, run_id)
end

-- The same for a run that waits for the call `index`; others have their own time in the index.
-- `h` has status, step, token, waiting, not_before.
local function rearm(h, index)
  local calls = waits_of(h.waiting, h.step)
  local patience = number(h.not_before)
  if h.status == 'in_progress' and h.token == '' and patience > 0 and has_call(calls, index) then
    arm(calls, patience)
  end
end

local ASKS = { ['@approval'] = true, ['@person'] = true }
local function ask_of(step, index) return step .. ' ' .. index .. ' ' .. run_id end

-- Lets a call wait for the answer of `key` until `till`; one to an earlier key is not for this call. A worker looks at it
-- `soon` (ms), or only when that time is over where a person is to answer.
local function await(index, place, key, now, till, soon)
  if redis.call('HGET', journal_key, 'k:' .. index) ~= key then redis.call('HDEL', journal_key, 'a:' .. index) end
  local is_ask = ASKS[string.match(place, '^[^:]+')]
  redis.call('HSET', journal_key, 'k:' .. index, key, 't:' .. index, digits(till), 'n:' .. index,
    digits(is_ask and till or math.min(soon, till)))
  if is_ask then
    redis.call('ZADD', shard .. 'asks', 'NX', digits(now), ask_of(redis.call('HGET', run_key, 'step'), index))
  end
end

-- The waiting call `index` has its answer: the last one makes the run due, and pushes its step. `h` has status, step,
-- waiting, not_before. Returns {'delivered', calls left, status}.
local function arrived(h, index, grace, message)
  local left = {}
  for _, call in ipairs(waits_of(h.waiting, h.step)) do
    if call[1] ~= index then left[#left + 1] = call end
  end
  redis.call('HSET', run_key, 'waiting', waiting_text(h.step, left))
  if #left == 0 then redis.call('HSET', run_key, 'not_before', 0, 'dispatches', 0) end
  if h.status == 'paused' then return { 'delivered', #left, h.status } end
  if #left > 0 then
    arm(left, number(h.not_before))
    return { 'delivered', #left, h.status }
  end
  redis.call('ZADD', due_key, now_ms() + number(grace), run_id)
  push(message)
  return { 'delivered', 0, h.status }
end
