-- Whether the caller is to look for overdue runs now: nobody has for ARGV[1] ms. Then it has the turn.
-- Returns {1 or 0, now}.
-- KEYS[1] when somebody looked last. A time that is yet to come (the clock was set back) keeps nobody.
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local last = tonumber(redis.call('GET', KEYS[1]))
if last and last <= now and now - last < tonumber(ARGV[1]) then return { 0, now } end
redis.call('SET', KEYS[1], string.format('%d', now), 'PX', ARGV[1])
return { 1, now }
