-- Ends the current attempt at a step. ARGV[2] step, ARGV[3] token, ARGV[4..] name, value pairs, without those that say
-- nothing ('' or 0):
--   verdict     continue | retry | finish | release
--   slim        the state after the step (JSON); log: what the step added, if it was one
--   since       what of the log claims read from here on (see claim), if less than all; trim: 1 if
--               the rest is to be forgotten (then the log is since..step-1)
--   outcome     the newest continuation outcome; want: the request that the worker knew
--   unread      which worker could not read the run, and why: nothing was done
--   delay, grace  ms: until the next attempt may start; until the run counts as overdue
--   message     next step's task, pushed here where store and broker are one Redis
--   events, event_count; tokens, cost (10^-9 USD), calls: what the step adds to its batch
--   attempt, limited: 1 if a retry used up a model attempt; if it was a refusal for now
--   lost        ledger entry (JSON) for work that was paid for and is not committed; failed: entries of calls
--               that failed before another model was called
--   guessed  what of the cost is by a default price; the header then notes that some is
--   ledger, kept  lines of the step's model calls, days that the ledger keeps; guess: what lost calls cost (see estimate)
--   estimated  1 where the step's tokens are estimates; shortened  'length' or 'content_filter' where a run completes with such
--               an answer
--   status, stop_reason, error, retention (s): of an end state
--   agent, config, overrides, model  of the agent that goes on with the run, if that is another one
--   outage      {since (ms), circuits} (JSON) of a step that waits for services that are out
--   hold        number of the request that holds the run's batch: the run is paused, unless there is a newer one
-- Returns {'committed', status, step, 'owed' if it owes its end to others (see settled.lua), 'last' if no other run of its
--   batch is open on this shard} | {'mine', status, step}: it was applied, its reply was lost
--   | {'lost', status}: another owner or step, nothing written but the ledger
--   | {'wanted', want}: a cancel arrived that the verdict does not know; nothing written.
-- Invariants: the log is 0..step-1; a run is in `due` exactly while it is ready or leased; an end
-- state is entered once.
local MOST_TRIMMED, KNOWN_LONGER, LONG_LOG = 1000, 50, 3000

-- Of a log that was long before it was first trimmed, not even all names may be read at once: its steps
-- go by their numbers, and after them those who committed them, by a scan that goes on where it was.
local function trim_long(first, kept)
  local at, scanned = string.match(redis.call('HGET', run_key, 'trimming') or '', '^(%d+) (%d+)$')
  at, scanned = number(at), scanned or '0'
  local last = math.min(first, at + MOST_TRIMMED / 2)
  for i = at, last - 1 do
    for _, name in ipairs({ tostring(i), 'input:' .. i }) do
      if not kept[name] then redis.call('HDEL', log_key, name) end
    end
    if not kept[tostring(i)] then redis.call('HDEL', outcomes_key, i) end
  end
  if last == first then
    local page = redis.call('HSCAN', log_key, scanned, 'COUNT', MOST_TRIMMED / 2)
    for i = 1, #page[2], 2 do
      if string.match(page[2][i], '^by:') and number(page[2][i + 1]) + KNOWN_LONGER < first then
        redis.call('HDEL', log_key, page[2][i])
      end
    end
    scanned = page[1]
  end
  redis.call('HSET', run_key, 'trimming', digits(last) .. ' ' .. scanned)
end

-- Forgets the log before the step `first`, but for the fields that `since` names. Of a long log a part
-- goes now, and the rest with later trims. Who committed a step is known for some steps more: its worker
-- may ask again when others have gone on.
local function trim(first, since)
  local kept, left = {}, MOST_TRIMMED
  for name in string.gmatch(since, '%S+') do kept[name] = true end
  if redis.call('HLEN', log_key) > LONG_LOG then return trim_long(first, kept) end
  for _, name in ipairs(redis.call('HKEYS', log_key)) do
    local by = string.match(name, '^by:')
    local at = by and number(redis.call('HGET', log_key, name)) + KNOWN_LONGER
      or tonumber(name) or tonumber(string.match(name, '^input:(%d+)$') or '')
    if at and at < first and not kept[name] then
      redis.call('HDEL', log_key, name)
      if not by then redis.call('HDEL', outcomes_key, name) end
      left = left - 1
      if left == 0 then break end
    end
  end
end

-- Writes anew what a run keeps that ends here: a stream's last node has room for more entries, and a hash in which a long
-- value stood (an active run's state) keeps the form for long ones. By a second key that takes the place of the first,
-- never by a removal, so that a cut append-only file has one of the two. Servers that deny COPY keep the larger form.
-- Runs that are cancelled, perhaps a hundred thousand at once, stay as they are.
local SMALL_STATE, MOST_COPIED = 512, 500
local function compact(slim)
  local spare = run_key .. ':spare'
  redis.call('UNLINK', spare)
  local is_short = redis.call('XLEN', events_key) <= MOST_COPIED
  if is_short and redis.pcall('COPY', events_key, spare) == 1 then redis.pcall('RENAME', spare, events_key) end
  redis.call('HDEL', run_key, 'lease', 'leased_at', 'elapsed', 'dispatches', 'logged') -- a claim writes them anew
  if #slim > SMALL_STATE then return end
  redis.call('HSET', spare, unpack(redis.call('HGETALL', run_key)))
  redis.call('RENAME', spare, run_key)
end

-- What the run waits for after this commit, if anything. While its step is open its calls stay known; so does an outage, until
-- a model has answered.
local function follow(wait, a, now)
  local delay = number(a.delay)
  local calls = not a.log and wait and wait.calls or nil
  local outage = a.outage and cjson.decode(a.outage) or a.verdict == 'release' and wait and wait.outage or nil
  if delay > 0 or calls or outage then
    local reason = a.outage and 'service' or delay > 0 and 'delay' or wait.reason
    local following = { reason = reason, key = a.unread, since = now, deadline = now + delay, uncounted = a.outage and true or nil,
      calls = calls, outage = outage, over = delay == 0 or nil }
    set_wait(run_key, following)
    return following
  end
  if wait then end_wait(run_key) end
end

local status, at, token, last_token, want, batch, feed, reached, logged, created, returns, waits = unpack(
  redis.call('HMGET', run_key, 'status', 'step', 'token', 'last_token', 'want', 'batch', 'feed', 'heard', 'logged', 'created',
    'returns', 'wait'))
local step = number(at)
local a = named(4)
if not status then return { 'lost', 'unknown' } end
-- The next step may be committed already when the call is repeated: the log knows each step's token.
local by = 'by:' .. ARGV[3]
if last_token == ARGV[3] then return { 'mine', status, step } end
if token ~= ARGV[3] or at ~= ARGV[2] then
  if redis.call('HEXISTS', log_key, by) == 1 then return { 'mine', status, step } end
  seldom('take_back', run_key, 'losses', 'crashes', at, ARGV[3])
  -- Better known than the crash that the next owner had noted under the same token.
  if a.dropped then seldom('note_late', batch, ARGV[3], a.dropped) end
  if a.failed then seldom('note_failed', batch, ARGV[3], a.failed, true) end
  return { 'lost', status }
end
local word, heard = flag_of(batch, reached)
want = wanted(want, word)
if want == 'cancel' and a.want ~= 'cancel' then return { 'wanted', want } end
local now, wait = now_ms(), waits and cjson.decode(waits) or nil -- its claim has made an earlier version's wait one of ours
if a.lost then seldom('note_lost', batch, ARGV[3], a.lost) end
if a.failed then seldom('note_failed', batch, ARGV[3], a.failed) end
if a.guess then seldom('estimate', batch, a.guess) end
if a.ledger then enter(shard .. 'costs', a.ledger, number(a.kept)) end
local orphans, entered = '', {}
if a.log then
  orphans = a.verdict == 'finish' and wait and seldom('runs_waited_for', wait) or ''
  redis.call('HSET', log_key, at, a.log, by, at)
  redis.call('HSET', outcomes_key, at, a.outcome)
  redis.call('DEL', journal_key)
  step = step + 1
  local noted, size = string.match(logged or '', '^(%d+) (%d+)$')
  logged = noted == at and digits(step) .. ' ' .. digits(number(size) + #a.log) or ''
  entered = { 'step', digits(step), 'attempt', '0', 'limited', '0', 'crashes', '0', 'logged', logged }
  count(batch, 'steps', 1)
  count(batch, 'tokens', number(a.tokens))
  count(batch, 'cost', number(a.cost))
  if a.guessed then
    count(batch, 'guessed', number(a.guessed))
    entered[#entered + 1], entered[#entered + 2] = 'guessed', '1'
  end
  count(batch, 'calls', number(a.calls))
  if a.estimated then entered[#entered + 1], entered[#entered + 2] = 'estimated', '1' end
end
redis.call('HSET', run_key, 'token', '', 'last_token', ARGV[3], 'dispatches', '0', 'slim', a.slim, 'outcome', a.outcome,
  'updated', digits(now), unpack(entered))
if a.agent then
  redis.call('HSET', run_key, 'agent', a.agent, 'config', a.config, 'overrides', a.overrides, 'model', a.model)
end
if a.since then
  if a.trim == '1' and redis.call('HGET', run_key, 'since') ~= a.since then
    seldom('trim', number(string.match(a.since, '^%d+')), a.since)
  end
  redis.call('HSET', run_key, 'since', a.since)
end
if wait and (a.log or a.verdict == 'finish') then seldom('drop_asks', wait, at) end
emit(a.events, a.event_count, feed)
if wait or a.outage or number(a.delay) > 0 then wait = seldom('follow', wait, a, now) end
if a.verdict == 'finish' then
  local price = not a.log and redis.call('HGET', journal_key, 'price')
  if price then seldom('note_lost', batch, 'paid', price) end
  a.created, a.returns = created, returns or ''
  compact(a.slim) -- before its keys expire: the new ones would not
  local is_last = finish(status, batch, a, now)
  local owes = a.returns == '1'
  if not a.log then
    owes = seldom('reach', 'cancel', now) or owes
  elseif orphans ~= '' then
    redis.call('HSET', run_key, 'reach', 'cancel', 'orphans', orphans, 'dispatches', '0')
    redis.call('ZADD', due_key, digits(now), run_id)
    owes = true
  end
  return { 'committed', a.status, step, owes and 'owed' or '', is_last and 'last' or '' }
end
if a.attempt == '1' then redis.call('HINCRBY', run_key, 'attempt', 1) end
if a.limited == '1' then redis.call('HINCRBY', run_key, 'limited', 1) end
for _, id in ipairs(a.outage and wait.outage.circuits or {}) do
  redis.call('SADD', shard .. 'service:' .. id, run_id)
  redis.call('EXPIRE', shard .. 'service:' .. id, 604800)
end
if a.hold and seldom('newest_request', batch) <= number(a.hold) then want = 'pause' end
if want == 'pause' then
  if heard then redis.call('HSET', run_key, 'heard', heard) end
  seldom('halt', status, batch, now)
  return { 'committed', 'paused', step }
end
local delay = number(a.delay)
redis.call('ZADD', due_key, digits(now + (delay > 0 and delay or number(a.grace))), run_id)
if delay == 0 then push(a.message) end
return { 'committed', status, step }
