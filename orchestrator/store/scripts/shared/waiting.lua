-- Shared by the scripts of runs that wait for tool calls on queues of their own. Follows common.lua.
--
-- The journal holds per call i: s:i how often it was started, o:i its owner's token, l:i the end of the owner's lease (ms),
-- n:i when the rescuer looks at it next, c:i how many owners vanished, x:i how, y:i '<token> <n>' of an owner that is an
-- isolated process for n suspects, w:i the owner's worker, e:i ms since it was taken, r:i its result; and for the step:
-- `spent`, ms of workers' time so far, `began` (ms), `paid`, the ledger entry if the wait is ended from outside.
--
-- A call whose queue is @run, @approval or @person has no worker: k:i is the key of what it
-- waits for, t:i its time limit (ms), a:i the answer (JSON). Those that people answer are in the shard's index `asks`.
local function call_of(wait, index)
  for _, call in ipairs(wait and wait.calls or {}) do
    if call[1] == tonumber(index) then return call end
  end
end

-- The earliest time at which one of the calls, or the end of the run's patience, needs attention.
local function arm(wait)
  local at = wait.deadline
  for _, call in ipairs(wait.calls) do
    at = math.min(at, number(redis.call('HGET', journal_key, 'n:' .. call[1])))
  end
  redis.call('ZADD', due_key, at, run_id)
end

-- The same for a run that waits for the call `index`; others have their own time in the index. `h` has status and token.
local function rearm(h, wait, index)
  if h.status == 'in_progress' and h.token == '' and is_on(wait) and call_of(wait, index) then arm(wait) end
end

-- Lets a call wait for the answer of `key` until `till`; one to an earlier key is not for this call. A worker looks at it
-- `soon` (ms), or only when that time is over where a person is to answer.
local function await(index, queue, key, now, till, soon)
  if redis.call('HGET', journal_key, 'k:' .. index) ~= key then redis.call('HDEL', journal_key, 'a:' .. index) end
  local is_ask = ASKS[queue]
  redis.call('HSET', journal_key, 'k:' .. index, key, 't:' .. index, digits(till), 'n:' .. index,
    digits(is_ask and till or math.min(soon, till)))
  if is_ask then
    redis.call('ZADD', shard .. 'asks', 'NX', digits(now), ask_of(redis.call('HGET', run_key, 'step'), index))
  end
end

-- The waiting call `index` has its answer: the last one makes the run due, and pushes its step. `h` has status, step.
-- Returns {'delivered', calls left, status}.
local function arrived(h, wait, index, grace, message)
  local left = {}
  for _, call in ipairs(wait.calls) do
    if call[1] ~= tonumber(index) then left[#left + 1] = call end
  end
  wait.calls = left[1] and left or nil
  if #left > 0 then
    set_wait(run_key, wait)
  else
    leave_wait(run_key, wait)
    redis.call('HSET', run_key, 'dispatches', 0)
  end
  if h.status == 'paused' then return { 'delivered', #left, h.status } end
  if #left > 0 then
    arm(wait)
  else
    redis.call('ZADD', due_key, now_ms() + number(grace), run_id)
    push(message)
  end
  return { 'delivered', #left, h.status }
end
