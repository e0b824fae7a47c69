-- Pauses a run before its next tool or step. ARGV[2] token of the request. Returns {'paused'}, {'requested'} (a worker
-- holds it), {'ended', status} or {'unknown'}. A step whose lease has expired has no owner: the run is paused here.
local h = redis.call('HMGET', run_key, 'status', 'token', 'batch', 'want', 'lease', 'step', 'elapsed')
if not h[1] then return { 'unknown' } end
local known = answered(ARGV[2])
if known then return known end
if TERMINAL[h[1]] then return { 'ended', h[1] } end
override_batch(h[3])
if h[1] == 'paused' then return answer(ARGV[2], 'paused') end
local now = now_ms()
if h[2] ~= '' and (number(h[5]) > now or h[4] == 'cancel') then
  if h[4] == '' then redis.call('HSET', run_key, 'want', 'pause') end
  return answer(ARGV[2], 'requested')
end
if h[2] ~= '' then vanish(h[3], h[2], h[6], h[7]) end
halt(h[1], h[3], now)
return answer(ARGV[2], 'paused')
