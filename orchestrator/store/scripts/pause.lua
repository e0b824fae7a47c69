-- Pauses a run at its next step boundary. Returns {'paused'}, {'requested'} (a worker holds it),
-- {'ended', status} or {'unknown'}.
local h = redis.call('HMGET', run_key, 'status', 'token', 'batch', 'want')
if not h[1] then return { 'unknown' } end
if TERMINAL[h[1]] then return { 'ended', h[1] } end
if h[1] == 'paused' then return { 'paused' } end
if h[2] ~= '' then
  if h[4] == '' then redis.call('HSET', run_key, 'want', 'pause') end
  return { 'requested' }
end
redis.call('HSET', run_key, 'status', 'paused', 'updated', now_ms())
redis.call('ZREM', due_key, run_id)
move(h[3], h[1], 'paused')
tell_status(h[1], 'paused')
return { 'paused' }
