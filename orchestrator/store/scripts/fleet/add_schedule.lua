-- Adds a schedule whose lines are stored. KEYS: schedules, their states, their ticks, their agents, its lines. ARGV: name, the
-- schedule (JSON), its agent's configuration (JSON), when to look at it (ms). Returns 1 (also to a repetition), or 0 where the
-- name is taken: then nothing is written. Nothing is left of an earlier schedule of that name.
if redis.call('HSETNX', KEYS[1], ARGV[1], ARGV[2]) == 0 then
  return redis.call('HGET', KEYS[1], ARGV[1]) == ARGV[2] and 1 or 0
end
redis.call('HSET', KEYS[4], ARGV[1], ARGV[3])
redis.call('HDEL', KEYS[2], ARGV[1], ARGV[1] .. ' now')
redis.call('ZADD', KEYS[3], ARGV[4], ARGV[1])
redis.call('PERSIST', KEYS[5])
return 1
