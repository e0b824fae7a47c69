-- Notes that a run has ended which this one waits for. ARGV[2] its id, ARGV[3] the step's task to push.
-- Returns {'noted', how many it waits for still}, or {'lost'}: it waits for nothing.
-- Invariant: each run counts once, however often its end is noted.
local h = fields_of(run_key, 'status', 'after', 'ahead')
if not h.status or TERMINAL[h.status] or not h.after then return { 'lost' } end
if redis.call('HSETNX', journal_key, 'd:' .. ARGV[2], '1') == 0 then return { 'noted', number(h.ahead) } end
local left = redis.call('HINCRBY', run_key, 'ahead', '-1')
if left <= 0 and h.status ~= 'paused' then
  redis.call('HSET', run_key, 'dispatches', 0)
  redis.call('ZADD', due_key, digits(now_ms()), run_id)
  push(ARGV[3])
end
return { 'noted', left }
