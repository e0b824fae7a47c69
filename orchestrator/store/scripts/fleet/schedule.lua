-- Changes a schedule that is there. KEYS: schedules, their states, their ticks, whose turn it is. ARGV: name, the schedule
-- (JSON), its state (JSON), when to look at it (ms), the token of whoever's turn it has to be, its `rows_key`; each '' to
-- stay as it is, for anybody, and of whichever has the name. Returns 1, or 0 where it has been removed, another one has its
-- name by now, or the turn is another's: then nothing is written.
local stored = redis.call('HGET', KEYS[1], ARGV[1])
if not stored then return 0 end
if ARGV[5] ~= '' and redis.call('GET', KEYS[4]) ~= ARGV[5] then return 0 end
if ARGV[6] ~= '' and cjson.decode(stored).rows_key ~= ARGV[6] then return 0 end
if ARGV[2] ~= '' then redis.call('HSET', KEYS[1], ARGV[1], ARGV[2]) end
if ARGV[3] ~= '' then redis.call('HSET', KEYS[2], ARGV[1], ARGV[3]) end
-- A client that lets it go on ends the turn of who has read it before, and would put it off.
if ARGV[3] ~= '' and ARGV[5] == '' then redis.call('DEL', KEYS[4]) end
if ARGV[4] ~= '' then redis.call('ZADD', KEYS[3], ARGV[4], ARGV[1]) end
return 1
