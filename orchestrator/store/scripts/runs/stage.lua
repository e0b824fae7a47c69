-- Keeps a part of the contents of an imported run (see adopt.lua) until all parts are there. ARGV[2] the
-- digest of the whole, ARGV[3] which part (log, outcomes or lost), ARGV[4] ms until an unused part is
-- gone, ARGV[5..] field, value, ... Doing it again changes nothing. Returns {'staged'}.
local key = run_key .. ':new:' .. ARGV[2] .. ':' .. ARGV[3]
-- One by one: a full Redis refuses at the first, and Lua cannot pass thousands of values in one call.
for i = 5, #ARGV, 2 do redis.call('HSET', key, ARGV[i], ARGV[i + 1]) end
redis.call('PEXPIRE', key, ARGV[4])
return { 'staged' }
