-- Notes a fact about a run that its steps do not know. ARGV[2] name, ARGV[3] value.
-- Returns 1, or 0 where there is no such run (and none is made).
if redis.call('EXISTS', run_key) == 0 then return 0 end
redis.call('HSET', run_key, ARGV[2], ARGV[3])
return 1
