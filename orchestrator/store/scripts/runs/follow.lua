-- Has the end of a run sent to another one. ARGV[2] the address of who waits for it: '<step> <index> <run>'.
-- Returns {'followed'}, {'ended', status}: it has ended already, {'full'}: too many follow it, or {'unknown'}.
local MOST_FOLLOWERS = 100000
local status = redis.call('HGET', run_key, 'status')
if not status then
  status = string.match(redis.call('HGET', archived_key(), run_id) or '', '%a+$')
  if not status then return { 'unknown' } end
end
if TERMINAL[status] then return { 'ended', status } end
local key = run_key .. ':returns'
if redis.call('SCARD', key) >= MOST_FOLLOWERS and redis.call('SISMEMBER', key, ARGV[2]) == 0 then return { 'full' } end
redis.call('SADD', key, ARGV[2])
redis.call('HSET', run_key, 'returns', '1')
return { 'followed' }
