-- Pauses a run before its next tool or step. ARGV[2] token of the request, ARGV[3] the run that it is paused with, or ''.
-- Returns {'paused'}, {'requested'} (a worker holds it), {'ended', status} or {'unknown'}. A step whose lease has expired
-- has no owner: the run is paused here.
-- Invariant: `paused_by` names another run exactly where that one's pause is why this one rests, or will.
local h = redis.call('HMGET', run_key, 'status', 'token', 'batch', 'want', 'lease', 'step', 'elapsed',
  'not_before')
if not h[1] then return { 'unknown' } end
local known = answered(ARGV[2])
if known then return known end
if TERMINAL[h[1]] then return { 'ended', h[1] } end
override_batch(h[3])
if h[1] == 'paused' then return answer(ARGV[2], 'paused') end
local now = now_ms()
local is_held = h[2] ~= '' and (number(h[5]) > now or h[4] == 'cancel')
if is_held and h[4] ~= '' then return answer(ARGV[2], 'requested') end
redis.call('HDEL', run_key, 'paused_by')
if ARGV[3] ~= '' then redis.call('HSET', run_key, 'paused_by', ARGV[3]) end
if is_held then
  redis.call('HSET', run_key, 'want', 'pause')
  return answer(ARGV[2], 'requested')
end
if h[2] ~= '' then vanish(h[3], h[2], h[6], h[7]) end
halt(h[1], h[3], now, is_hinted(h[2], h[8]))
return answer(ARGV[2], 'paused')
