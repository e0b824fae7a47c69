-- Cancels a run. ARGV[2..] pairs: outcome, stop_reason, status, error, retention, note. Returns {'cancelled',
-- 'waiting' if tool calls of it may be under way, or ''} (it ended here), {'requested', worker} (the worker that holds
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
-- A step that waits for tools has paid for its answer. Retry finds both in the journal again.
local paid = redis.call('HGET', journal_key, 'paid')
if paid then note_lost(h[3], 'paid', paid) end
tell_status(h[1], a.status)
finish(h[1], h[3], a, now_ms())
return { 'cancelled', paid and 'waiting' or '' }
