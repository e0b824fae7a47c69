-- Reads a day of the ledger on one shard. KEYS[1] its lines that are not summed yet, KEYS[2] its rows of the day.
-- ARGV[1] the day. Returns the rows (field, numbers, ...) and the lines of that day: all of it at one moment.
local lines, first = {}, ARGV[1] .. ' '
for _, line in ipairs(redis.call('LRANGE', KEYS[1], 0, -1)) do
  if string.sub(line, 1, #first) == first then lines[#lines + 1] = line end
end
return { redis.call('HGETALL', KEYS[2]), lines }
