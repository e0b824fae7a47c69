-- Lets a paused run go on. ARGV[2] grace ms, ARGV[3] message to enqueue or '', ARGV[4] token of the request.
-- Returns {'resumed', step}, {'active'} (it was not paused), {'ended', status} or {'unknown'}.
local h = redis.call('HMGET', run_key, 'status', 'want', 'step', 'batch', 'execution_started', 'updated',
  'waiting', 'not_before')
if not h[1] then return { 'unknown' } end
local known = answered(ARGV[4])
if known then return known end
if TERMINAL[h[1]] then return { 'ended', h[1] } end
override_batch(h[4])
if h[1] ~= 'paused' then
  if h[2] == 'pause' then
    redis.call('HSET', run_key, 'want', '')
    redis.call('HDEL', run_key, 'paused_by')
  end
  return answer(ARGV[4], 'active')
end
local is_sent = go_again({ step = h[3], batch = h[4], began = h[5], updated = h[6], waiting = h[7], not_before = h[8] },
  ARGV[2], now_ms())
if not is_sent then push(ARGV[3]) end
return answer(ARGV[4], 'resumed', h[3])
