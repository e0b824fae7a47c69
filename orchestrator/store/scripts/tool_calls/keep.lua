-- Renews the lease of a tool call. ARGV[2] step, ARGV[3] index, ARGV[4] token, ARGV[5] lease ms,
-- ARGV[6] ms since it was taken. Returns {'held', want} or {'lost'}: its result is not wanted any
-- more, since the run has ended or gone on, or another worker has taken the call over.
local h = fields_of(run_key, 'status', 'step', 'token', 'wait', 'v', 'want')
local index = ARGV[3]
local j = redis.call('HMGET', journal_key, 'o:' .. index, 'r:' .. index)
if not h.status or TERMINAL[h.status] or h.step ~= ARGV[2] or j[1] ~= ARGV[4] or j[2] then
  if h.status then take_back(journal_key, 'x:' .. index, 'c:' .. index, h.step, ARGV[4]) end
  return { 'lost' }
end
local till = now_ms() + number(ARGV[5])
local due = redis.call('HMGET', journal_key, 'n:' .. index, 'l:' .. index)
local look = number(due[1]) < number(due[2]) and number(due[1]) or till
redis.call('HSET', journal_key, 'l:' .. index, till, 'n:' .. index, look, 'e:' .. index, ARGV[6])
rearm(h, wait_of(run_key, h.wait, h.v), index)
return { 'held', h.want }
