-- Notes in the header how many tool calls of a run are not shown any more. ARGV[2] field, ARGV[3]
-- their number. Returns 1, or 0 for a run that is not there (any more).
if redis.call('EXISTS', run_key) == 0 then return 0 end
-- A late repetition does not show again what was cleared since.
if number(redis.call('HGET', run_key, ARGV[2])) >= number(ARGV[3]) then return 1 end
redis.call('HSET', run_key, ARGV[2], ARGV[3])
return 1
