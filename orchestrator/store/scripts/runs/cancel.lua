-- Cancels a run. ARGV[2..] pairs: outcome, stop_reason, status, error, retention, note, request (a token). Returns {'cancelled',
-- 'waiting' if tool calls of it may be under way, or ''} (it ended here), {'requested', worker} (the worker that holds
-- it ends it), {'ended', status} or {'unknown'}. This script is the linearization point. A step whose lease has
-- expired has no owner: the run ends here.
local h = redis.call('HMGET', run_key, 'status', 'token', 'batch', 'worker', 'lease', 'step', 'elapsed')
if not h[1] then return { 'unknown' } end
local a = named(2)
local known = answered(a.request)
if known then return known end
if TERMINAL[h[1]] then return { 'ended', h[1] } end
local now = now_ms()
redis.call('HSET', run_key, 'want_note', a.note)
if h[2] ~= '' and number(h[5]) > now then
  redis.call('HSET', run_key, 'want', 'cancel')
  return answer(a.request, 'requested', h[4])
end
if h[2] ~= '' then vanish(h[3], h[2], h[6], h[7]) end
return answer(a.request, 'cancelled', abandon(h[1], h[3], h[6], h[2], a, now))
