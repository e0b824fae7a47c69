-- Ends deliveries.
--
-- KEYS  1 unacked_index (zset), 2 unacked (hash)
-- ARGV  tags: at least one, at most a thousand
-- returns how many of them were still registered
-- Invariant: repeating it changes nothing.

redis.call('ZREM', KEYS[1], unpack(ARGV))
return redis.call('HDEL', KEYS[2], unpack(ARGV))
