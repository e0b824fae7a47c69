-- Creates a run, once. ARGV[2] grace ms, ARGV[3] initial messages, ARGV[4] message to enqueue or '',
-- ARGV[5] events, ARGV[6] their count, ARGV[7] delay ms, ARGV[8..] header fields.
-- Returns 'created' (also to a repetition: the field `made` is the call's token), or 'exists' and changes nothing:
-- submitting twice is harmless. Returns 'other' where `given`, the digest of what the run is made of, is not that of the run
-- which is there. Returns 'cancelled', and makes none, where the run's batch was cancelled.
-- A new run joins the tail of the queue; later steps join its head, so that begun runs finish before
-- others begin.
local a = named(8)
if redis.call('EXISTS', run_key) == 1 then
  local known = seldom('fields_of', run_key, 'made', 'given', 'batch')
  if known.made == a.made then return 'created' end
  -- Runs of older clients have no `given`.
  local is_other = a.given and ((known.given or a.given) ~= a.given or known.batch ~= a.batch)
  return is_other and 'other' or 'exists'
end
if is_archived() then return 'exists' end
if a.batch ~= '' and redis.call('HEXISTS', flags_key, 'x:' .. a.batch) == 1 then return 'cancelled' end
local now = now_ms()
local delay = number(ARGV[7])
local created, feed = digits(now), feeds()
redis.call('HSET', run_key, 'status', 'queued', 'step', '0', 'token', '', 'last_token', '', 'lease', '0',
  'attempt', '0', 'limited', '0', 'crashes', '0', 'dispatches', '0', 'want', '', 'created', created,
  'updated', created, 'logged', '0 ' .. #ARGV[3], unpack(ARGV, 8))
if feed == '1' then redis.call('HSET', run_key, 'feed', feed) end
if a.after then
  seldom('set_wait', run_key, { reason = 'runs', since = now })
elseif delay > 0 then
  seldom('set_wait', run_key, { reason = 'delay', since = now, deadline = now + delay })
end
redis.call('HSET', log_key, 'input:0', ARGV[3])
if a.returns == '1' then redis.call('SADD', run_key .. ':returns', a.returns_to) end
redis.call('ZADD', due_key, digits(now + (delay > 0 and delay or number(ARGV[2]))), run_id)
count(a.batch, 'total', 1)
-- Counters of a shard expire when all its runs have ended, and live again with the next one.
if a.batch ~= '' and redis.call('HINCRBY', batch_key(a.batch), 'open', '1') == 1 then
  seldom('go_on', a.batch)
end
redis.call('ZADD', shard .. 'runs:queued', created, run_id)
count(a.batch, 'status:queued', 1)
emit(ARGV[5], ARGV[6], feed)
if ARGV[4] ~= '' and queue_key and delay == 0 then redis.call('LPUSH', queue_key, ARGV[4]) end
return 'created'
