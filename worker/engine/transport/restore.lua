-- Restores one unacknowledged message to the queues that it came from.
--
-- KEYS  1 unacked_index (zset), 2 unacked (hash), 3.. the lists that get it
-- ARGV  1 tag, 2 "1" to queue it after the others, 3 the message
-- returns 1 if it was restored, 0 if nobody held it any more
-- Invariant: of any number of workers that try, exactly one restores it, and none after its
--       acknowledgement.

redis.call('ZREM', KEYS[1], ARGV[1])
if redis.call('HDEL', KEYS[2], ARGV[1]) == 0 then
  return 0
end
for list = 3, #KEYS do
  redis.call(ARGV[2] == '1' and 'LPUSH' or 'RPUSH', KEYS[list], ARGV[3])
end
return 1
