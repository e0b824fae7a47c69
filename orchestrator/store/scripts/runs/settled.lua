-- Notes that others know of a run's end, or that a request has reached its runs. ARGV[2] the request that was passed
-- on ('' for none), ARGV[3] the number of the run's events when that was read, ARGV[4..] addresses that were answered.
-- Returns how many addresses are left. Where the run has gone on meanwhile, it owes its next end, or request, anew.
-- Invariant: a run that has ended, or is paused, is in `due` exactly while it owes something.
local key = run_key .. ':returns'
local h = fields_of(run_key, 'status', 'reach', 'wait', 'v', 'token', 'seq')
local is_read = (h.seq or '0') == ARGV[3]
for i = 4, is_read and #ARGV or 0 do redis.call('SREM', key, ARGV[i]) end
local left = redis.call('SCARD', key)
if not h.status then return 0 end
local is_open = h.reach
if is_read and h.reach == ARGV[2] then
  redis.call('HDEL', run_key, 'reach', 'orphans')
  is_open = nil
end
if left == 0 then redis.call('HSET', run_key, 'returns', '') end
local owes = is_open or (TERMINAL[h.status] and left > 0)
if (TERMINAL[h.status] or h.status == 'paused') and not owes then redis.call('ZREM', due_key, run_id) end
-- It was resumed while its runs were being paused: they are looked at once more.
local wait = ARGV[2] == 'pause' and h.status == 'in_progress' and h.token == '' and wait_of(run_key, h.wait, h.v) or nil
if is_on(wait) and wait.calls then
  local now = digits(now_ms())
  for _, call in ipairs(wait.calls) do
    if call[2] == '@run' then redis.call('HSET', journal_key, 'n:' .. call[1], now) end
  end
  arm(wait)
end
return left
