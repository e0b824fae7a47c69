-- Puts a run that waits for limits of the fleet out of sight of the search for overdue runs, or back into it.
-- ARGV[2] the step that waits, or '' for whichever, ARGV[3] ms until the run is overdue again, or '' to put it away.
-- Returns 1, or 0 where nothing was changed: the run has an owner, has moved on, or a request has not reached it.
-- Runs that were put away have a score beyond every due time. Nothing searches for them: admission dispatches
-- them, and the times in between do not count as time of their executions (see claim.lua). Of a step that its provider
-- has refused again and again they do: whatever the provider answers, `time_limit` ends the run.
local REFUSALS = 3
local now = now_ms()
if ARGV[3] ~= '' then
  local score = number(redis.call('ZSCORE', due_key, run_id))
  if score < SHELVED then return 0 end
  redis.call('ZADD', due_key, digits(now + number(ARGV[3])), run_id)
  return 1
end
local h = fields_of(run_key, 'status', 'step', 'token', 'want', 'limited')
local is_open = h.status == 'queued' or h.status == 'in_progress'
if not is_open or h.step ~= ARGV[2] or h.token ~= '' or h.want ~= '' then return 0 end
redis.call('HSET', run_key, 'not_before', digits(now))
if number(h.limited) < REFUSALS then redis.call('HSET', run_key, 'parked', digits(now)) end
redis.call('ZADD', due_key, digits(SHELVED + now), run_id)
return 1
