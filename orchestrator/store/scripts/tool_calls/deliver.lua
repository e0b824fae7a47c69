-- Delivers the result of a tool call. ARGV[2] step, ARGV[3] index, ARGV[4] token, ARGV[5..] name,
-- value pairs: record (JSON), spent (ms), lost (ledger entry if it is refused), grace (ms), message
-- (the step's task). Returns {'delivered', calls left, status}, {'mine'}: a repetition, whose first
-- reply was lost, or {'lost', status}: the run has ended or gone on, or another worker owns the
-- call; then nothing is written but the ledger. The last result makes the run due, and pushes its
-- step, in here.
local h = fields_of(run_key, 'status', 'step', 'token', 'wait', 'v', 'batch')
local status, index = h.status, ARGV[3]
local a = named(5)
if not status then return { 'lost', 'unknown' } end
local by = 'by:' .. ARGV[4]
local delivered = redis.call('HGET', log_key, by)
if delivered and delivered ~= '-1' then return { 'mine' } end
local j = redis.call('HMGET', journal_key, 'o:' .. index, 'r:' .. index)
local wait = wait_of(run_key, h.wait, h.v)
local is_awaited = call_of(wait, index) ~= nil
-- A worker took the step when the run's patience had ended: it answers this call by itself.
local answered = h.token ~= '' and is_awaited
if TERMINAL[status] or h.step ~= ARGV[2] or j[1] ~= ARGV[4] or j[2] or answered then
  take_back(journal_key, 'x:' .. index, 'c:' .. index, h.step, ARGV[4])
  note_late(h.batch, ARGV[4], a.lost)
  return { 'lost', status }
end
redis.call('HSET', journal_key, 'r:' .. index, a.record)
redis.call('HINCRBY', journal_key, 'spent', digits(number(a.spent)))
redis.call('HSET', log_key, by, ARGV[2])
-- A run that was retried, or has lost its patience, does not wait now: its step finds the result.
if h.token ~= '' or not is_on(wait) or not is_awaited then
  local calls = wait and wait.calls and #wait.calls or 0
  return { 'delivered', calls - (is_awaited and 1 or 0), status }
end
return arrived(h, wait, index, a.grace, a.message)
