-- Shared by the scripts of runs that wait for tool calls on queues of their own. Follows common.lua.
--
-- The header's `waiting` is '<step> <index>:<queue>:<tool> ...': the open step's calls without a
-- result. A run waits while that step is still the run's, nobody holds the step, and `not_before`,
-- the end of its patience, is to come. The journal holds per call i: s:i how often it was started,
-- o:i its owner's token, l:i the end of the owner's lease (ms), n:i when the rescuer looks at it
-- next, c:i how many owners vanished, x:i how, y:i '<token> <n>' of an owner that is an
-- isolated process for n suspects, w:i the owner's worker, e:i ms since it was taken, r:i its result; and for the
-- step: `spent`, ms of workers' time so far, `began` (ms), `paid`, the ledger entry if the wait is ended from outside.
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
-- `h` is status, step, token, waiting, -, not_before.
local function rearm(h, index)
  local calls = waits_of(h[4], h[2])
  local patience = number(h[6])
  if h[1] == 'in_progress' and h[3] == '' and patience > 0 and has_call(calls, index) then
    arm(calls, patience)
  end
end
