-- Whose turn it is to look after something. KEYS[1] holds the owner's token for a few seconds. ARGV: word, token, ms.
-- Returns 1, or 0 where the turn is another's. `take` begins it, where nobody has it; a turn that is to last longer than
-- any does (the clock was set back) is nobody's. `hold` prolongs the caller's own, `release` ends it.
local key, token, ms = KEYS[1], ARGV[2], tonumber(ARGV[3])
local owner = redis.call('GET', key)
if ARGV[1] == 'take' then
  if owner and redis.call('PTTL', key) <= ms then return 0 end
  redis.call('DEL', key) -- a script that has written may go on where memory is full: turns may free some
  redis.call('SET', key, token, 'PX', ms)
  return 1
end
if owner ~= token then return 0 end
if ARGV[1] == 'hold' then redis.call('PEXPIRE', key, ms) else redis.call('DEL', key) end
return 1
