-- Gives a tool call back, for another worker. ARGV[2] step, ARGV[3] index, ARGV[4] token, ARGV[5] ms
-- until it is dispatched again, ARGV[6] '1' if it was not started after all, ARGV[7] ledger entry or
-- ''. Returns {'left'} or {'lost'}. No crash is counted.
local h = fields_of(run_key, 'status', 'step', 'token', 'wait', 'v', 'batch')
local index = ARGV[3]
local j = redis.call('HMGET', journal_key, 'o:' .. index, 'r:' .. index)
if not h.status or TERMINAL[h.status] or h.step ~= ARGV[2] or j[1] ~= ARGV[4] or j[2] then return { 'lost' } end
-- Somebody has asked for an earlier look since it was taken (a resume, a settled pause): that stays.
local due = redis.call('HMGET', journal_key, 'n:' .. index, 'l:' .. index)
local later = now_ms() + number(ARGV[5])
if number(due[1]) < number(due[2]) then later = math.min(later, number(due[1])) end
redis.call('HSET', journal_key, 'o:' .. index, '', 'n:' .. index, later)
-- A call that no tool's worker makes is looked at again and again, and taking it twice does no harm.
if redis.call('HEXISTS', journal_key, 'k:' .. index) == 0 then redis.call('HSET', log_key, 'by:' .. ARGV[4], ARGV[2]) end
if ARGV[6] == '1' and redis.call('HINCRBY', journal_key, 's:' .. index, -1) <= 0 then
  redis.call('HDEL', journal_key, 's:' .. index)
end
if ARGV[7] ~= '' then note_lost(h.batch, ARGV[4], ARGV[7]) end
rearm(h, wait_of(run_key, h.wait, h.v), index)
return { 'left' }
