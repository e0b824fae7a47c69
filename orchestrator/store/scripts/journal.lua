-- Renews the lease of a step and notes what must not be done twice. ARGV[2] step, ARGV[3] token,
-- ARGV[4] lease ms, ARGV[5] ms since the claim, ARGV[6..] journal field, value, ...
-- Returns {'held', what is wanted of the run ('' | 'cancel' | 'pause')} or {'lost'}.
-- Invariant: only the owner of the current token writes.
local h = redis.call('HMGET', run_key, 'token', 'step', 'want')
if h[1] ~= ARGV[3] or h[2] ~= ARGV[2] then return { 'lost' } end
local till = now_ms() + number(ARGV[4])
redis.call('HSET', run_key, 'lease', till, 'elapsed', ARGV[5])
redis.call('ZADD', due_key, till, run_id)
if #ARGV > 5 then redis.call('HSET', journal_key, unpack(ARGV, 6)) end
return { 'held', h[3] }
