-- Notes that the caller writes records of this run from here on, in its own version.
-- ARGV[2] version. Returns {'noted'} or {'unknown'}.
-- Invariant: a run's version never goes down, so that nobody reads what a newer version wrote.
if redis.call('HEXISTS', run_key, 'status') == 0 then return { 'unknown' } end
if number(redis.call('HGET', run_key, 'v')) < number(ARGV[2]) then
  redis.call('HSET', run_key, 'v', ARGV[2])
end
return { 'noted' }
