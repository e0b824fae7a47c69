-- Lets a paused run go on. ARGV[2] grace ms, ARGV[3] message to enqueue or '', ARGV[4] token of the request.
-- Returns {'resumed', step}, {'active'} (it was not paused), {'ended', status} or {'unknown'}.
local h = fields_of(run_key, 'status', 'want', 'step', 'batch', 'execution_started', 'updated', 'wait', 'v')
if not h.status then return { 'unknown' } end
local known = answered(ARGV[4])
if known then return known end
if TERMINAL[h.status] then return { 'ended', h.status } end
override_batch(h.batch)
if h.status ~= 'paused' then
  if h.want == 'pause' then
    redis.call('HSET', run_key, 'want', '')
    redis.call('HDEL', run_key, 'paused_by')
  end
  return answer(ARGV[4], 'active')
end
if not go_again(h, ARGV[2], now_ms()) then push(ARGV[3]) end
return answer(ARGV[4], 'resumed', h.step)
