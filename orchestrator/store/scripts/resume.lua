-- Takes a pause back. ARGV[2] grace ms, ARGV[3] message to enqueue or ''.
-- Returns {'resumed', step}, {'active'} (it was not paused), {'ended', status} or {'unknown'}.
-- The time in between does not count as time of the execution.
local h = redis.call('HMGET', run_key, 'status', 'want', 'step', 'batch', 'execution_started', 'updated')
if not h[1] then return { 'unknown' } end
if TERMINAL[h[1]] then return { 'ended', h[1] } end
if h[1] ~= 'paused' then
  if h[2] == 'pause' then redis.call('HSET', run_key, 'want', '') end
  return { 'active' }
end
local now = now_ms()
local to = h[5] and 'in_progress' or 'queued'
if h[5] then redis.call('HINCRBY', run_key, 'execution_started', now - number(h[6])) end
redis.call('HSET', run_key, 'status', to, 'updated', now, 'not_before', 0, 'dispatches', 0)
redis.call('ZADD', due_key, now + number(ARGV[2]), run_id)
move(h[4], 'paused', to)
push(ARGV[3])
return { 'resumed', h[3] }
