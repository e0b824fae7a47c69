-- Takes a configuration out of the index of last uses (KEYS[1]). ARGV[1] its digest, ARGV[2] when it
-- was used, as the caller has read it. Returns 1, or 0 where it was used since.
if redis.call('ZSCORE', KEYS[1], ARGV[1]) ~= ARGV[2] then return 0 end
return redis.call('ZREM', KEYS[1], ARGV[1])
