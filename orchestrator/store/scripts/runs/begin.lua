-- Lets a run begin that has waited for the ends of others, or ends it. ARGV[2] the number of its events when the caller
-- read it, ARGV[3..] pairs: what ('wait', 'again', 'begin' or 'end'), later (ms: when it is looked at again, if nothing comes),
-- then for 'again': run (the id of a run that goes on: it is waited for once more); for 'begin': input (its messages), grace,
-- message (the step's task); for 'end': those of cancel.lua. Returns {what was done}, 'ready' in place of 'wait' where all
-- have ended, or 'changed': somebody was faster.
-- Invariant: a run has its own input before it begins, and begins once.
local h = fields_of(run_key, 'status', 'after', 'ahead', 'seq', 'token', 'batch', 'step')
local a = named(3)
local is_still = h.status and not TERMINAL[h.status] and h.status ~= 'paused' and h.after
if not is_still or h.seq ~= ARGV[2] or h.token ~= '' then return { 'changed' } end
local now = now_ms()
if a.what == 'wait' then
  if number(h.ahead) <= 0 then return { 'ready' } end
  redis.call('ZADD', due_key, digits(now + number(a.later)), run_id)
elseif a.what == 'again' then
  if redis.call('HDEL', journal_key, 'd:' .. a.run) == 1 then redis.call('HINCRBY', run_key, 'ahead', '1') end
elseif number(h.ahead) > 0 then
  return { 'changed' }
elseif a.what == 'begin' then
  redis.call('HSET', log_key, 'input:0', a.input)
  end_wait(run_key)
  redis.call('HSET', run_key, 'logged', '0 ' .. #a.input, 'updated', digits(now), 'dispatches', 0)
  redis.call('HDEL', run_key, 'after', 'ahead')
  redis.call('DEL', journal_key)
  redis.call('ZADD', due_key, digits(now + number(a.grace)), run_id)
  push(a.message)
else
  abandon(h.status, h.batch, h.step, '', a, now)
end
return { a.what }
