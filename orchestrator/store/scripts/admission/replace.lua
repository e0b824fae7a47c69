-- Writes limits that nobody has changed since they were read. KEYS[1] the settings, ARGV for each limit its name, the
-- text that was read ('' for none), and the new one. Returns how many were written.
local written = 0
for at = 1, #ARGV, 3 do
  if (redis.call('HGET', KEYS[1], ARGV[at]) or '') == ARGV[at + 1] then
    redis.call('HSET', KEYS[1], ARGV[at], ARGV[at + 2])
    written = written + 1
  end
end
-- The version is a time: after a loss of the key none comes twice.
local t = redis.call('TIME')
if written > 0 then redis.call('HSET', KEYS[1], 'version', string.format('%d%06d', t[1], t[2])) end
return written
