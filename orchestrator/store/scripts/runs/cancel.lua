-- Cancels a run. ARGV[2..] pairs: outcome, stop_reason, status, error, retention, note, request (a token). Returns {'cancelled',
-- 'waiting' if tool calls of it may be under way, or ''} (it ended here), {'requested', worker} (the worker that holds
-- it ends it), {'ended', status} or {'unknown'}. This script is the linearization point. A step whose lease has
-- expired has no owner: the run ends here.
local h = fields_of(run_key, 'status', 'token', 'batch', 'worker', 'lease', 'step', 'elapsed')
if not h.status then return { 'unknown' } end
local a = named(2)
local known = answered(a.request)
if known then return known end
if TERMINAL[h.status] then return { 'ended', h.status } end
local now = now_ms()
redis.call('HSET', run_key, 'want_note', a.note)
if h.token ~= '' and number(h.lease) > now then
  redis.call('HSET', run_key, 'want', 'cancel')
  return answer(a.request, 'requested', h.worker)
end
if h.token ~= '' then vanish(h.batch, h.token, h.step, h.elapsed) end
return answer(a.request, 'cancelled', abandon(h.status, h.batch, h.step, h.token, a, now))
