-- Gives a call that waits for another run or a person its answer. ARGV[2] step, ARGV[3] index, ARGV[4] the key of what
-- it waits for, ARGV[5..] name, value pairs: answer (JSON), by_person ('1' for a decision that is not the time limit's),
-- events, event_count, grace (ms), message. Returns
-- {'delivered', calls left, status}, {'before', answer}: it has one already, which stays, or {'lost', status}: the run
-- has ended or gone on, or waits for something else; then nothing is written.
-- Invariants: an answer is written once, and only to the call that waits for it.
local h = fields_of(run_key, 'status', 'step', 'token', 'wait', 'v', 'batch', 'feed')
local index = ARGV[3]
local a = named(5)
if not h.status then return { 'lost', 'unknown' } end
local j = redis.call('HMGET', journal_key, 'k:' .. index, 'a:' .. index)
local mine = h.step == ARGV[2] and j[1] == ARGV[4]
if mine and j[2] then return { 'before', j[2] } end
local wait = wait_of(run_key, h.wait, h.v)
if TERMINAL[h.status] or not mine or not call_of(wait, index) then return { 'lost', h.status } end
-- A worker took the step when the run's patience had ended: it goes on without this answer.
if h.token ~= '' or not is_on(wait) then return { 'lost', h.status } end
-- Nobody decides after the time limit, whether a worker has noticed it or not. While the run is paused, no time passes.
if a.by_person == '1' and h.status ~= 'paused' then
  local till = math.min(number(redis.call('HGET', journal_key, 't:' .. index)), wait.deadline)
  if now_ms() >= till then return { 'lost', h.status } end
end
redis.call('HSET', journal_key, 'a:' .. index, a.answer)
redis.call('ZREM', shard .. 'asks', ask_of(ARGV[2], index))
-- An approved call may wait anew, for a worker of its queue: nothing is left of who looked after it, who would put it off
-- or, if lost, count as one that had begun to make it.
for _, name in ipairs({ 'n:', 't:', 'o:', 'l:', 's:', 'c:', 'x:', 'y:', 'e:', 'w:' }) do
  redis.call('HDEL', journal_key, name .. index)
end
emit(a.events, a.event_count, h.feed)
return arrived(h, wait, index, a.grace, a.message)
