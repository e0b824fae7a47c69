-- Takes the delivery of one outlet for a while, and moves its positions in the feeds.
-- KEYS[1] owner   KEYS[2] places (hash: shard -> entry of its feed, its number)
-- ARGV[1] caller   ARGV[2] ms   ARGV[3..] name, value, ...: positions reached; `lost` is added to
-- Returns {'owner', place, ...}, or {'other'} while another caller owns it: nothing was written.
-- Invariant: only the owner moves positions, so that undelivered events are delivered again.
local owner = redis.call('GET', KEYS[1])
if owner and owner ~= ARGV[1] then return { 'other' } end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
for i = 3, #ARGV, 2 do
  if ARGV[i] == 'lost' then
    redis.pcall('HINCRBY', KEYS[2], 'lost', ARGV[i + 1])
  else
    redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1])
  end
end
local out = { 'owner' }
for _, value in ipairs(redis.call('HGETALL', KEYS[2])) do out[#out + 1] = value end
return out
