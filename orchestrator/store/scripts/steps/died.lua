-- Counts the death of a process that had a step or a tool call, as its parent process has seen it, and
-- gives the work to others at once. ARGV[2] step, ARGV[3] token, or '' with ARGV[7], ARGV[4] the index
-- of the call or '', ARGV[5] how it was lost ('a' and the number that shared the process, 'c' for a
-- pool's child), ARGV[6] the step's task or '', ARGV[7] the name of the worker that has died. Returns 1,
-- or 0 where another owner has the work: a loss that was counted then is described better now.
-- Invariants: an owner's loss is counted once; its token neither claims the step again, nor is a commit of it taken for
-- one that was applied.
local index, how = ARGV[4], ARGV[5]
local h = fields_of(run_key, 'status', 'step', 'token', 'wait', 'v', 'batch', 'losses',
  'elapsed', 'worker', 'uncalled')
if not h.status or TERMINAL[h.status] or h.step ~= ARGV[2] then return 0 end
local key, field, crashes = run_key, 'losses', 'crashes'
local owner, known, elapsed, worker = h.token, h.losses, h.elapsed, h.worker
if index ~= '' then
  key, field, crashes = journal_key, 'x:' .. index, 'c:' .. index
  local j = redis.call('HMGET', journal_key, 'o:' .. index, field, 'e:' .. index, 'w:' .. index, 'r:' .. index)
  if j[5] then return 0 end
  owner, known, elapsed, worker = j[1], j[2], j[3], j[4]
end
local token = ARGV[3]
if token == '' and worker == ARGV[7] then token = owner or '' end
if token == '' then return 0 end
if owner ~= token then
  if lost_how(known, h.step, token) then redis.call('HSET', key, field, with_loss(known, h.step, token, how)) end
  return 0
end
redis.call('HINCRBY', key, crashes, 1)
redis.call('HSET', key, field, with_loss(known, h.step, token, how))
local called = index == '' and may_have_called(token, h.uncalled)
if index == '' then note_unpaid(h.step, token, h.uncalled) end
note_lost(h.batch, token, '{"kind":"crash","step":' .. (number(h.step) + 1) .. ',"seconds":'
  .. (number(elapsed) / 1000) .. ',"ambiguous":' .. tostring(called) .. '}')
local now = now_ms()
if index ~= '' then
  redis.call('HSET', journal_key, 'o:' .. index, '', 'n:' .. index, now)
  -- So that nobody takes the call under this token again; of a delivery it tells the step.
  redis.call('HSET', log_key, 'by:' .. token, '-1')
  rearm(h, wait_of(run_key, h.wait, h.v), index)
  return 1
end
redis.call('HSET', run_key, 'token', '', 'last_token', 'died:' .. token, 'dispatches', '0', 'updated', digits(now))
redis.call('ZADD', due_key, digits(now), run_id)
push(ARGV[6])
return 1
