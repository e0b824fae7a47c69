-- Whether the caller should look for overdue runs now: no other has for ARGV[1] ms. Then it has the turn.
-- Returns {1 or 0, now}.
-- KEYS[1] time of the last look. A time in the future (the clock was set back) does not count.
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local last = tonumber(redis.call('GET', KEYS[1]))
if last and last <= now and now - last < tonumber(ARGV[1]) then return { 0, now } end
redis.call('SET', KEYS[1], string.format('%d', now), 'PX', ARGV[1])
return { 1, now }
