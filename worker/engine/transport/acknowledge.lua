-- Ends deliveries.
--
-- KEYS  1 unacked_index (zset), 2 unacked (hash)
-- ARGV  tags
-- returns how many of them were still registered
-- Invariant: repeating it changes nothing.

local ended = 0
for _, tag in ipairs(ARGV) do
  redis.call('ZREM', KEYS[1], tag)
  ended = ended + redis.call('HDEL', KEYS[2], tag)
end
return ended
