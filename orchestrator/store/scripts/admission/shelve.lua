-- Lets a run wait for a limit of the fleet, or has it looked at soon. ARGV[2] the step that waits, ARGV[3] the limit; or ''
-- twice, if it waits for one. ARGV[4] ms until the run is looked at.
-- Returns 1, or 0 where nothing was changed: the run has an owner, has moved on, or a request has not reached it.
-- Admission dispatches it; rescuers look now and then whether it is in a line still (see rescue.lua). The time in between does
-- not count as time of its execution. Of a step that its provider has refused again and again it does: whatever the provider
-- answers, `time_limit` ends the run.
local REFUSALS = 3
local h = fields_of(run_key, 'status', 'step', 'token', 'want', 'limited', 'wait', 'v')
local is_open = h.status == 'queued' or h.status == 'in_progress'
local wait, now = is_open and wait_of(run_key, h.wait, h.v) or nil, now_ms()
if ARGV[2] == '' then
  if not is_on(wait) or wait.reason ~= 'limit' then return 0 end
elseif not is_open or h.step ~= ARGV[2] or h.token ~= '' or h.want ~= '' then
  return 0
else
  set_wait(run_key, { reason = 'limit', key = ARGV[3], since = now, deadline = now, calls = wait and wait.calls,
    uncounted = number(h.limited) < REFUSALS or nil, outage = wait and wait.outage })
end
redis.call('ZADD', due_key, digits(now + number(ARGV[4])), run_id)
return 1
