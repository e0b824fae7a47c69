-- Notes the token of a process of its own that begins work which has ended its workers. ARGV[2] step,
-- ARGV[3] token, ARGV[4] the index of a tool call or ''. Returns 1, or 0 where the token owns neither any more.
-- The journal's `t` (of the step) and t:<index> go with the step's commit, or when the run is retried.
local index = ARGV[4]
local h = redis.call('HMGET', run_key, 'token', 'step')
local owner = h[1]
if index ~= '' then owner = redis.call('HGET', journal_key, 'o:' .. index) end
if owner ~= ARGV[3] or h[2] ~= ARGV[2] then return 0 end
redis.call('HSET', journal_key, index == '' and 't' or 't:' .. index, ARGV[3])
return 1
