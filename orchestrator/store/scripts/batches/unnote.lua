-- Takes a batch out of the index of unfinished sweeps, unless another caller has moved it since. KEYS[1] the index, ARGV[1]
-- batch, ARGV[2] the time (score) that it had. Returns 1, or 0 where it stays.
local at = redis.call('ZSCORE', KEYS[1], ARGV[1])
if not at or tonumber(at) ~= tonumber(ARGV[2]) then return 0 end
return redis.call('ZREM', KEYS[1], ARGV[1])
