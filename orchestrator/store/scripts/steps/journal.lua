-- Renews the lease of a step and notes work that must not be repeated. ARGV[2] step, ARGV[3] token,
-- ARGV[4] lease ms, ARGV[5] ms since the claim, ARGV[6..] journal field, value, ... ; a first field `called` is 1 where
-- a model call is made now, 0 where none was made so far (see claim); the next one, `failed`, has entries of the ledger (see commit): neither is of the journal.
-- Returns {'held', a request to the run ('' | 'cancel' | 'pause')} or {'lost'}. With entries a
-- paused fleet answers 'pause' too. With a request, no start is noted, and none may follow.
-- Invariants: only the owner of the current token writes; no tool starts, and no result is noted,
-- beside a response that the store has lost since: the next owner would take it for that of another response.
local token, at, word, batch, reached = unpack(redis.call('HMGET', run_key, 'token', 'step', 'want', 'batch', 'heard'))
if token ~= ARGV[3] or at ~= ARGV[2] then
  if at then seldom('take_back', run_key, 'losses', 'crashes', at, ARGV[3]) end
  return { 'lost' }
end
local of_tools = ARGV[6] and string.match(ARGV[6], '^[rs]:')
if of_tools and redis.call('HEXISTS', journal_key, 'response') == 0 then return { 'lost' } end
local till = digits(now_ms() + number(ARGV[4]))
redis.call('HSET', run_key, 'lease', till, 'elapsed', ARGV[5])
redis.call('ZADD', due_key, till, run_id)
local flags = redis.call('HMGET', flags_key, 'fleet', 'b:' .. (batch or ''))
local want = wanted(word, (pending_request(flags[2], reached)))
if want == '' and ARGV[6] and flags[1] then want = 'pause' end
local entries, first = {}, 6
if ARGV[first] == 'called' then
  if ARGV[first + 1] == '1' then
    redis.call('HDEL', run_key, 'uncalled')
  else
    redis.call('HSET', run_key, 'uncalled', ARGV[3])
  end
  first = first + 2
end
if ARGV[first] == 'failed' then
  seldom('note_failed', batch, ARGV[3], ARGV[first + 1])
  first = first + 2
end
for i = first, #ARGV, 2 do
  if want == '' or string.sub(ARGV[i], 1, 2) ~= 's:' then
    entries[#entries + 1] = ARGV[i]
    entries[#entries + 1] = ARGV[i + 1]
  end
end
-- Lua can pass some thousand values at once.
for i = 1, #entries, 1000 do
  redis.call('HSET', journal_key, unpack(entries, i, math.min(i + 999, #entries)))
end
return { 'held', want }
