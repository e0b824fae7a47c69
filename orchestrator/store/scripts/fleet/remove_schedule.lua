-- Removes a schedule, or what is left of one. KEYS: schedules, their states, their ticks, their agents, its lines, whose turn
-- it is. ARGV: name, the schedule (JSON) as the caller has read it, or '' for none. Returns 1, or 0 where it is another one by now: then
-- nothing is removed. With it ends the turn of who looks after it: that one notes nothing with the next of its name.
if (redis.call('HGET', KEYS[1], ARGV[1]) or '') ~= ARGV[2] then return 0 end
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('HDEL', KEYS[2], ARGV[1], ARGV[1] .. ' now')
redis.call('ZREM', KEYS[3], ARGV[1])
redis.call('HDEL', KEYS[4], ARGV[1])
redis.call('UNLINK', KEYS[5], KEYS[6])
return 1
