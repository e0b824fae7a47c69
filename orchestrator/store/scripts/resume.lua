-- Takes a pause back. ARGV[2] grace ms, ARGV[3] message to enqueue or '', ARGV[4] token of the request.
-- Returns {'resumed', step}, {'active'} (it was not paused), {'ended', status} or {'unknown'}.
-- The time in between does not count as time of the execution.
local h = redis.call('HMGET', run_key, 'status', 'want', 'step', 'batch', 'execution_started', 'updated',
  'waiting', 'not_before')
if not h[1] then return { 'unknown' } end
local known = answered(ARGV[4])
if known then return known end
if TERMINAL[h[1]] then return { 'ended', h[1] } end
if h[1] ~= 'paused' then
  if h[2] == 'pause' then redis.call('HSET', run_key, 'want', '') end
  return answer(ARGV[4], 'active')
end
local now = now_ms()
local to = h[5] and 'in_progress' or 'queued'
if h[5] then redis.call('HSET', run_key, 'execution_started', digits(number(h[5]) + now - number(h[6]))) end
-- A step that waits for tool calls goes on waiting; they are dispatched again by the rescuer.
local waits = h[7] and string.match(h[7], '^(%d+) ') == h[3] and number(h[8]) > 0
local patience = waits and number(h[8]) + now - number(h[6]) or 0
for index in string.gmatch(waits and h[7] or '', ' (%d+):') do
  local owner = redis.call('HGET', journal_key, 'o:' .. index)
  if not owner or owner == '' then redis.call('HSET', journal_key, 'n:' .. index, now) end
end
redis.call('HSET', run_key, 'status', to, 'updated', now, 'not_before', patience, 'dispatches', 0)
redis.call('ZADD', due_key, waits and now or now + number(ARGV[2]), run_id)
move(h[4], 'paused', to)
tell_status('paused', to)
if not waits then push(ARGV[3]) end
return answer(ARGV[4], 'resumed', h[3])
