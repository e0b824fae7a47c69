-- Makes runs due that wait for a service. KEYS[1] the shard's due index, ARGV[1] circuit, ARGV[2] how many at most,
-- ARGV[3] 'probes' where they are to find out whether it is back, else 'waits'. Returns {how many it looked at, woke}.
-- A run that has ended, is paused, or has gone on leaves the circuit's set without being woken.
local due_key = KEYS[1]
local shard = string.sub(due_key, 1, -4)
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local found = redis.call('SPOP', shard .. 'service:' .. ARGV[1], ARGV[2])
-- Workers of the version before have a set of their own: they would lose our runs.
local left = ARGV[2] - #found
for _, run_id in ipairs(left > 0 and redis.call('SPOP', shard .. 'out:' .. ARGV[1], left) or {}) do found[#found + 1] = run_id end
local woke = 0
for _, run_id in ipairs(found) do
  local run_key = shard .. 'run:' .. run_id
  local h = fields_of(run_key, 'status', 'token', 'wait', 'v')
  local is_open = (h.status == 'queued' or h.status == 'in_progress') and h.token == ''
  local wait = is_open and wait_of(run_key, h.wait, h.v) or nil
  if wait and wait.outage and string.find(table.concat(wait.outage.circuits, ' '), ARGV[1], 1, true) then
    if wait.over then wait.since, wait.over = now, nil end
    wait.deadline, wait.outage.probes = now, ARGV[3] == 'probes'
    set_wait(run_key, wait)
    redis.call('ZADD', due_key, now, run_id)
    woke = woke + 1
  end
end
return { #found, woke }
