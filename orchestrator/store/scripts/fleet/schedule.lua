-- Changes a schedule that is there. KEYS: schedules, their states, their ticks, whose turn it is. ARGV: name, the schedule
-- (JSON), its state (JSON), when to look at it (ms), the token of whoever's turn it has to be; each '' to stay as it is,
-- and for anybody. Returns 1, or 0 where it has been removed, or the turn is another's: then nothing is written.
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then return 0 end
if ARGV[5] ~= '' and redis.call('GET', KEYS[4]) ~= ARGV[5] then return 0 end
if ARGV[2] ~= '' then redis.call('HSET', KEYS[1], ARGV[1], ARGV[2]) end
if ARGV[3] ~= '' then redis.call('HSET', KEYS[2], ARGV[1], ARGV[3]) end
if ARGV[4] ~= '' then redis.call('ZADD', KEYS[3], ARGV[4], ARGV[1]) end
return 1
