-- Continues an ended run. ARGV[2..] pairs: expected (number of events that the caller saw: every end
-- has emitted one, so that no older end of the run is mistaken for this one), step (to continue at),
-- slim (the state before it), since (the part of the log that claims read, or '' for all), overrides,
-- agent, config (of the agent before a hand-off that is taken back), journal:<field> (one for each entry), message,
-- grace, anew (1 for a new execution), tokens, cost, guessed, calls (what the removed step had added), ledger (lines that take its calls back), events, event_count, lost, input
-- (messages to give before that step, after those given already, or ''), request (a token).
-- Returns {'retried', step}, {'active', status}, {'changed', step} (another caller was faster) or
-- {'unknown'}. Everything before that step, its answer and its finished tools, are kept.
local h = fields_of(run_key, 'status', 'step', 'batch', 'seq')
if not h.status then return { 'unknown' } end
local a = named(2)
local known = answered(a.request)
if known then return known end
if not TERMINAL[h.status] then return { 'active', h.status } end
if h.seq ~= a.expected then return { 'changed', h.step } end
local now, step, batch = now_ms(), number(a.step), h.batch
reopen(h.status, 'in_progress', batch)
override_batch(batch)
-- It has not begun: it waits once more for all the runs before it.
local waits = redis.call('HEXISTS', run_key, 'after') == 1
for _, name in ipairs(waits and redis.call('HKEYS', journal_key) or {}) do
  redis.call('HDEL', journal_key, name)
  redis.call('HINCRBY', run_key, 'ahead', '1')
end
for i = step, number(h.step) - 1 do
  redis.call('HDEL', log_key, i)
  redis.call('HDEL', outcomes_key, i)
end
if step < number(h.step) then
  count(batch, 'steps', step - number(h.step))
  count(batch, 'tokens', -number(a.tokens))
  count(batch, 'cost', -number(a.cost))
  count(batch, 'guessed', -number(a.guessed))
  count(batch, 'calls', -number(a.calls))
  if a.ledger then enter(shard .. 'costs', a.ledger) end
end
-- Before the entries of what is taken back: those are of that agent.
if a.agent then redis.call('HSET', run_key, 'agent', a.agent, 'config', a.config) end
if a.lost ~= '' then note_lost(batch, 'retry:' .. h.seq, a.lost) end
if a.input ~= '' then
  -- Inputs before that step that no step has answered stay: both are JSON lists.
  local earlier = redis.call('HGET', log_key, 'input:' .. step)
  local given = earlier and string.sub(earlier, 1, -2) .. ',' .. string.sub(a.input, 2) or a.input
  redis.call('HSET', log_key, 'input:' .. step, given)
end
-- An open step's answer is of no use where the run goes on before it, or the conversation has changed.
if step < number(h.step) or a.input ~= '' then
  if redis.call('HEXISTS', journal_key, 'response') == 1 and redis.call('HEXISTS', lost_key, 'paid') == 0 then
    note_lost(batch, 'open:' .. h.seq, redis.call('HGET', journal_key, 'price')
      or '{"kind":"retried","step":' .. (number(h.step) + 1) .. ',"ambiguous":true}')
  end
  redis.call('DEL', journal_key)
  -- An older wait's entry stays; the next one gets its own.
  local paid = redis.call('HGET', lost_key, 'paid')
  if paid then
    redis.call('HDEL', lost_key, 'paid')
    redis.call('HSET', lost_key, 'paid:' .. h.seq, paid)
  end
elseif redis.call('HEXISTS', lost_key, 'paid') == 1 then
  -- The answer that was listed when the wait was cancelled is used after all.
  account(batch, 'paid', redis.call('HGET', lost_key, 'paid'), -1)
  redis.call('HDEL', lost_key, 'paid')
  count(batch, 'lost', -1)
end
-- Limits of the execution count from here on.
local vain = a.anew == '1' and redis.call('HGET', run_key, 'vain')
if vain then redis.call('HSET', run_key, 'vain_before', vain) end
for _, name in ipairs(redis.call('HKEYS', journal_key)) do
  if string.match(name, '^[ctxy]:?%d*$') then redis.call('HDEL', journal_key, name) end
  -- A run that a call has started, and that did not complete, is retried with this one.
  if string.match(name, '^a:%d+$') then
    local end_ = cjson.decode(redis.call('HGET', journal_key, name)).run
    if type(end_) == 'table' and end_.status ~= 'completed' then redis.call('HDEL', journal_key, name) end
  end
end
-- One by one: Lua cannot pass thousands of values in one call.
for i = 2, #ARGV, 2 do
  local field = string.match(ARGV[i], '^journal:(.+)$')
  if field then redis.call('HSET', journal_key, field, ARGV[i + 1]) end
end
redis.call('HSET', run_key, 'status', 'in_progress', 'step', step, 'slim', a.slim, 'overrides', a.overrides,
  'attempt', 0, 'limited', 0, 'crashes', 0, 'dispatches', 0, 'token', '', 'want', '',
  'stop_reason', '', 'error', '', 'outcome', '', 'updated', now)
end_wait(run_key)
if waits then set_wait(run_key, { reason = 'runs', since = now }) end
redis.call('HDEL', run_key, 'ended', 'execution_started', 'since', 'losses', 'unpaid', 'trial', 'logged', 'trimming', 'reach',
  'orphans', 'hinted')
if a.since and a.since ~= '' then redis.call('HSET', run_key, 'since', a.since) end
redis.call('ZADD', due_key, now + number(a.grace), run_id)
local feed = feeds()
redis.call('HSET', run_key, 'feed', feed)
emit(a.events, a.event_count, feed)
push(a.message)
return answer(a.request, 'retried', tostring(step))
