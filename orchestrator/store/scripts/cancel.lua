-- Cancels a run. ARGV[2..] pairs: outcome, stop_reason, status, error, retention, note, events,
-- event_count. Returns {'cancelled'} (it ended here), {'requested', worker} (the worker that holds
-- it ends it), {'ended', status} or {'unknown'}. This script is the linearization point.
local h = redis.call('HMGET', run_key, 'status', 'token', 'batch', 'worker')
if not h[1] then return { 'unknown' } end
if TERMINAL[h[1]] then return { 'ended', h[1] } end
local a = named(2)
redis.call('HSET', run_key, 'want_note', a.note)
if h[2] ~= '' then
  redis.call('HSET', run_key, 'want', 'cancel')
  return { 'requested', h[4] }
end
emit(a.events, a.event_count)
finish(h[1], h[3], a, now_ms())
return { 'cancelled' }
