-- Lets a step wait, without a slot, for tool calls that are tasks of their own. ARGV[2] step,
-- ARGV[3] token, ARGV[4] number of calls, then index, queue, tool, message, key, ms of each; after them name,
-- value pairs: want (the request that the worker knew), patience, grace (ms), began (ms), spent (ms
-- of this part of the step), paid, dropped, failed (ledger entries), events, event_count.
-- KEYS[3..] the calls' broker lists, in their order (only where store and broker are one Redis).
-- A queue that begins with @ is none: the call waits for another run or a person, whose answer (see answer.lua)
-- must name its key. ms is its time limit, or ''; the rescuer looks at other calls after the grace time.
-- Returns what a commit returns. The calls' tasks are pushed here; nothing is written to the log.
-- Invariants: nobody claims the step before the last result or the end of the run's patience.
local h = fields_of(run_key, 'status', 'step', 'token', 'last_token', 'want', 'batch', 'feed', 'heard')
local status, step, want, batch = h.status, number(h.step), h.want, h.batch
local n = number(ARGV[4])
local a = named(5 + 6 * n)
if not status then return { 'lost', 'unknown' } end
local by = 'by:' .. ARGV[3]
if h.last_token == ARGV[3] then return { 'mine', status, step } end
if h.token ~= ARGV[3] or h.step ~= ARGV[2] then
  if redis.call('HEXISTS', log_key, by) == 1 then return { 'mine', status, step } end
  take_back(run_key, 'losses', 'crashes', h.step, ARGV[3])
  if a.dropped ~= '' then note_late(batch, ARGV[3], a.dropped) end
  if a.failed then note_failed(batch, ARGV[3], a.failed, true) end
  return { 'lost', status }
end
local word, heard = flag_of(batch, h.heard)
want = wanted(want, word)
if want == 'cancel' and a.want ~= 'cancel' then return { 'wanted', want } end
-- The store may have lost it since; then the step is repeated when its lease has expired.
if redis.call('HEXISTS', journal_key, 'response') == 0 then
  note_lost(batch, ARGV[3], a.dropped)
  return { 'lost', status }
end
local now = now_ms()
local patience, calls, messages = now + number(a.patience), {}, {}
for i = 0, n - 1 do
  local index, queue, tool, message, key, ms = unpack(ARGV, 5 + 6 * i, 10 + 6 * i)
  -- A call may have been delivered, or taken, since the wait before this one.
  if redis.call('HEXISTS', journal_key, 'r:' .. index) == 0 then
    calls[#calls + 1] = { tonumber(index), queue, tool }
    if key ~= '' then
      await(index, queue, key, now, ms ~= '' and now + number(ms) or patience, now + number(a.grace))
      messages[#messages + 1] = { KEYS[3 + i], message }
    elseif number(redis.call('HGET', journal_key, 'n:' .. index)) <= now then
      -- It may have waited for an approval before.
      redis.call('HDEL', journal_key, 'k:' .. index)
      redis.call('HSET', journal_key, 'n:' .. index, now + number(a.grace))
      messages[#messages + 1] = { KEYS[3 + i], message }
    end
  end
end
redis.call('HSET', log_key, by, step)
redis.call('HSETNX', journal_key, 'began', a.began)
redis.call('HINCRBY', journal_key, 'spent', digits(number(a.spent)))
redis.call('HSET', journal_key, 'paid', a.paid)
redis.call('HSET', run_key, 'token', '', 'last_token', ARGV[3], 'dispatches', 0, 'updated', now)
local wait = { reason = 'calls', since = now, deadline = patience, calls = calls }
if #calls > 0 then set_wait(run_key, wait) else end_wait(run_key) end
emit(a.events, a.event_count, h.feed)
if want == 'pause' then
  if heard then redis.call('HSET', run_key, 'heard', heard) end
  halt(status, batch, now)
  return { 'committed', 'paused', step }
end
if #calls > 0 then arm(wait) else redis.call('ZADD', due_key, now, run_id) end
for _, message in ipairs(messages) do
  if message[2] ~= '' then redis.call('LPUSH', message[1], message[2]) end
end
return { 'committed', status, step }
