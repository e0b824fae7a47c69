-- Pauses a run before its next tool or step. ARGV[2] token of the request, ARGV[3] the run that it is paused with, or ''.
-- Returns {'paused'}, {'requested'} (a worker holds it), {'ended', status} or {'unknown'}. A step whose lease has expired
-- has no owner: the run is paused here.
-- Invariant: `paused_by` names another run exactly where that one's pause is why this one rests, or will.
local h = fields_of(run_key, 'status', 'token', 'batch', 'want', 'lease', 'step', 'elapsed', 'wait', 'v')
if not h.status then return { 'unknown' } end
local known = answered(ARGV[2])
if known then return known end
if TERMINAL[h.status] then return { 'ended', h.status } end
override_batch(h.batch)
if h.status == 'paused' then return answer(ARGV[2], 'paused') end
local now = now_ms()
local is_held = h.token ~= '' and (number(h.lease) > now or h.want == 'cancel')
if is_held and h.want ~= '' then return answer(ARGV[2], 'requested') end
redis.call('HDEL', run_key, 'paused_by')
if ARGV[3] ~= '' then redis.call('HSET', run_key, 'paused_by', ARGV[3]) end
if is_held then
  redis.call('HSET', run_key, 'want', 'pause')
  return answer(ARGV[2], 'requested')
end
if h.token ~= '' then vanish(h.batch, h.token, h.step, h.elapsed) end
halt(h.status, h.batch, now, is_hinted(h.token, wait_of(run_key, h.wait, h.v)))
return answer(ARGV[2], 'paused')
