-- Shared by every script of a run. Concatenated in front of it.
--
-- KEYS[1] run header   KEYS[2] the shard's due index   KEYS[3] broker list (only where store and
-- broker are one Redis)         ARGV[1] run id         ARGV[2..] see each script
-- All keys of a run, and the indexes of its shard, carry the shard's hash tag, so that every
-- script touches one slot; the names of the others are derived from KEYS[1] and KEYS[2].
--
-- seldom('name', ...) calls a function that is built at that moment only (see store/lua.py): for what most calls of a
-- script do not need.
local run_key, due_key, queue_key = KEYS[1], KEYS[2], KEYS[3]
local run_id = ARGV[1]
local log_key, journal_key = run_key .. ':log', run_key .. ':journal'
local lost_key = run_key .. ':lost'
local events_key = run_key .. ':events'
local outcomes_key = run_key .. ':outcomes'
local ALL_KEYS = { run_key, log_key, journal_key, outcomes_key, lost_key, events_key }
local shard = string.sub(due_key, 1, -4)
local TERMINAL = { completed = true, failed = true, cancelled = true, stopped = true }

local function now_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

-- ARGV[first], ARGV[first + 1], ... as a table of name -> text
local function named(first)
  local out = {}
  for i = first, #ARGV, 2 do out[ARGV[i]] = ARGV[i + 1] end
  return out
end

-- Numbers come from outside (usage, times, settings): none may make a command refuse it after the
-- first write. They are within what a double holds exactly; anything but a number is 0.
local LARGEST = 9007199254740991
local function number(text)
  local value = tonumber(text) or 0
  if value > LARGEST then return LARGEST end
  if value < -LARGEST then return -LARGEST end
  return value == value and value or 0
end

-- A number that a script writes goes through the conversion of doubles, with 17 digits: that is slow,
-- so what is written at every step is text.
local function digits(whole) return string.format('%d', whole) end

local function batch_key(batch) return shard .. 'batch:' .. batch end

-- The numbers of the files of archived runs: one hash of 256 of the shard.
local function archived_key() return shard .. 'archived:' .. string.sub(run_id, -2) end
local function is_archived() return redis.call('HEXISTS', archived_key(), run_id) == 1 end

-- A counter that would overflow stays as it is: nothing may end a script between its writes.
local function count(batch, field, by)
  if batch and batch ~= '' and by ~= 0 then redis.pcall('HINCRBY', batch_key(batch), field, digits(by)) end
end

-- Enters a lost attempt into the ledger of model calls, or takes it back. The header has the sums of these calls in `vain`
-- (calls, tokens, 10^-9 USD), for the run's own limits, and in `unpriced` the calls without a price.
local MOST_UNPRICED = 32
local function account(batch, entry, text, sign)
  if not may_be_paid(text) then return end
  local h = fields_of(run_key, 'tenant', 'agent', 'unpriced', 'billed', 'vain')
  local line, is_open, numbers = line_of(text, sign, h.tenant, h.agent, h.billed or batch)
  if line then
    enter(shard .. 'costs', line)
    local vain = { numbers[1], numbers[2] + numbers[5], numbers[8] }
    add(vain, h.vain or '')
    redis.call('HSET', run_key, 'vain', joined(vain))
  end
  if not is_open or sign < 0 then return end
  local names = {}
  for name in string.gmatch(h.unpriced or '', '%S+') do names[#names + 1] = name end
  names[#names + 1] = entry
  redis.call('HSET', run_key, 'unpriced', table.concat(names, ' ', math.max(#names - MOST_UNPRICED + 1, 1)))
end

-- The agent whose call a known entry was for, or the attempt's own entry where this is another call of that: a hand-off
-- may have changed the header's since.
local function known_agent(entry, before)
  before = before or redis.call('HGET', lost_key, (string.gsub(entry, ':%d+$', '')))
  local readable, e = pcall(cjson.decode, before or '')
  return readable and type(e) == 'table' and type(e.agent) == 'string' and e.agent or redis.call('HGET', run_key, 'agent')
end

-- The ledger holds one entry per attempt; a better one replaces it and is not counted again. Of
-- refusals without end, which cost nothing, the first thousand and the newest stay.
local MOST_LOST = 1000
local function note_lost(batch, entry, text)
  local is_free = string.find(text, '"kind":"deferred"', 1, true) and not string.find(text, '"ambiguous":true', 1, true)
  if is_free and redis.call('HLEN', lost_key) >= MOST_LOST then entry = 'deferred' end
  local before = not is_free and redis.call('HGET', lost_key, entry)
  local agent = (before or may_be_paid(text)) and known_agent(entry, before)
  text = '{"at_ms":' .. digits(now_ms()) .. (agent and ',"agent":' .. cjson.encode(agent) or '') .. ',' .. string.sub(text, 2)
  if redis.call('HSET', lost_key, entry, text) == 1 then count(batch, 'lost', 1) end
  if before then account(batch, entry, before, -1) end
  account(batch, entry, text, 1)
end


-- The open step's calls that have no price yet get the estimate of the call that was made in their place, by their
-- model. `guesses`: JSON list of model, fields of an entry (JSON); the first is for calls whose model is not known.
local function estimate(batch, guesses)
  local prices, first = {}, nil
  for _, one in ipairs(cjson.decode(guesses)) do
    first = first or one[2]
    prices[one[1]] = prices[one[1]] or one[2]
  end
  for entry in string.gmatch(redis.call('HGET', run_key, 'unpriced') or '', '%S+') do
    local text = redis.call('HGET', lost_key, entry)
    if text and not string.find(text, '"tokens":', 1, true) then
      local readable, known = pcall(cjson.decode, text)
      local priced = string.sub(text, 1, -2) .. ',' .. string.sub(readable and prices[known.model] or first, 2)
      redis.call('HSET', lost_key, entry, priced)
      account(batch, entry, text, -1)
      account(batch, entry, priced, 1)
    end
  end
  redis.call('HDEL', run_key, 'unpriced')
end

-- Gives the calls of a run that ends without a worker the model that its agent calls first, where theirs is not known.
local function name_calls(batch)
  local h = fields_of(run_key, 'config', 'model', 'unpriced', 'tenant', 'agent', 'billed')
  local config, model = string.match(h.model or '', '^(%S+) (.+)$')
  if not model or config ~= h.config then return end -- of an older client, or another agent has the run
  for entry in string.gmatch(h.unpriced or '', '%S+') do
    local text = redis.call('HGET', lost_key, entry)
    if text and not string.find(text, '"model":"', 1, true) then
      local named = string.sub(text, 1, -2) .. ',"model":' .. cjson.encode(model) .. '}'
      redis.call('HSET', lost_key, entry, named)
      for _, one in ipairs({ { text, -1 }, { named, 1 } }) do
        local line = line_of(one[1], one[2], h.tenant, h.agent, h.billed or batch)
        if line then enter(shard .. 'costs', line) end
      end
    end
  end
end

-- The same for a run that may have ended: what is noted after its end must not outlive it.
local function note_late(batch, entry, text)
  note_lost(batch, entry, text)
  local left = redis.call('PTTL', run_key)
  if left > 0 then redis.call('PEXPIRE', lost_key, left) end
end

-- Entries of further calls of an attempt, with record separators between; a number in front of them says how many it has
-- entered before.
local function note_failed(batch, entry, texts, is_late)
  local n, note = 1 + number(string.match(texts, '^%d+')), is_late and note_late or note_lost
  for text in string.gmatch(texts, '{[^\30]*') do
    n = n + 1
    note(batch, entry .. ':' .. digits(n), text)
  end
end

-- How attempts were lost: '<step> <token>:<how> ...' (protocol/suspicion.py says what `how`
-- means), in the header's `losses`, and in the journal's x:<index> of a tool call.
local MOST_LOSSES = 32
local function lost_how(text, step, token)
  if not text or string.match(text, '^(%d+) ') ~= tostring(step) then return nil end
  local _, at = string.find(text, ' ' .. token .. ':', 1, true)
  return at and string.match(text, '^%a%d*', at + 1)
end

-- The text with how the owner of `token` was lost, or without that owner where `how` is nil.
local function with_loss(text, step, token, how)
  local kept = {}
  if text and string.match(text, '^(%d+) ') == tostring(step) then
    for one, known in string.gmatch(text, ' ([^ ]+):(%a%d*)') do
      if one ~= token then kept[#kept + 1] = one .. ':' .. known end
    end
  end
  if how then kept[#kept + 1] = token .. ':' .. how end
  return step .. ' ' .. table.concat(kept, ' ', math.max(#kept - MOST_LOSSES + 1, 1))
end

-- An owner that still writes has not died: the loss that was counted when its lease was over is taken
-- back. `key` holds the losses in `field` and their number in `crashes`.
local function take_back(key, field, crashes, step, token)
  local text = redis.call('HGET', key, field)
  local how = lost_how(text, step, token)
  if not how or string.match(how, '^[ac]') then return end
  redis.call('HSET', key, field, with_loss(text, step, token))
  if number(redis.call('HGET', key, crashes)) > 0 then redis.call('HINCRBY', key, crashes, -1) end
  local entry = redis.call('HGET', lost_key, token)
  if entry then redis.call('HSET', lost_key, token, (string.gsub(entry, '"kind":"crash"', '"kind":"late"', 1))) end
end

-- Each run of a shard is in one list, at its time of creation: that of its status, or of the stop reason of its end.
local function list_of(status, reason) return TERMINAL[status] and reason ~= '' and reason or status end

local function relist(from, to, created)
  redis.call('ZREM', shard .. 'runs:' .. from, run_id)
  redis.call('ZADD', shard .. 'runs:' .. to, digits(number(created or redis.call('HGET', run_key, 'created'))), run_id)
end

local function move(batch, from, to)
  if from == to then return end
  count(batch, 'status:' .. from, -1)
  count(batch, 'status:' .. to, 1)
end

-- One stream entry holds all events of one write; their sequence numbers have no gap.
-- `feed` is the header's field: where it is set, the shard's feed points to the entry, and workers
-- broadcast from there.
local function emit(events, n, feed)
  n = number(n)
  if n == 0 then return end
  local last = redis.call('HINCRBY', run_key, 'seq', digits(n))
  local first = digits(last - n + 1)
  local at = redis.call('XADD', events_key, 'MAXLEN', '~', '1000', '*', 'first', first, 'events', events)
  if feed == '1' then
    local place = redis.call('INCR', shard .. 'feed:count')
    redis.call('XADD', shard .. 'feed', 'MAXLEN', '~', '20000', '*', 'n', place, 'run', run_id, 'at', at)
  end
end

-- Whether the events of a run that begins now are broadcast: some worker has switched the feed on.
local function feeds() return redis.call('EXISTS', shard .. 'feed:on') == 1 and '1' or '0' end

-- Emits a change of status that no caller emits. Readers take its time from the stream's entry, and
-- make the envelope from the list (see records/events.py).
-- A large state is not parsed, which would delay all others: then the last answer is left out.
local LARGE_STATE = 65536
local function parsed_state(slim)
  if slim and #slim > LARGE_STATE then
    local execution = string.match(string.sub(slim, 1, 2048), '"execution_id":"([^"\\]+)"')
    return { step_count = number(redis.call('HGET', run_key, 'step')), info = { execution_id = execution } }
  end
  local readable, state = pcall(cjson.decode, slim)
  return readable and type(state) == 'table' and state or {}
end

local function emit_status(from, to)
  local h = fields_of(run_key, 'slim', 'feed')
  local state = parsed_state(h.slim)
  local execution = state.info and state.info.execution_id
  if execution == run_id .. ':1' then execution = nil end
  local fields = { to, from, state.step_count or 0, state.last_output or cjson.null, execution or cjson.null,
    state.parent_agent_id or cjson.null }
  emit('s' .. cjson.encode(fields), 1, h.feed)
end

local LONGEST_LIFE = 3153600000
local function lifetime(seconds) return digits(math.max(1, math.min(number(seconds), LONGEST_LIFE))) end

-- Has workers look whether a batch has ended as a whole, on all shards, or has begun anew: see expire.lua.
local function look_at_batch(batch, now)
  redis.call('ZADD', shard .. 'over', digits(now), batch)
  return true
end

-- Without a lifetime a run stays until it is archived: see archive.lua.
local function retain(seconds)
  if number(seconds) == 0 then return redis.call('ZADD', shard .. 'aging', digits(now_ms()), run_id) end
  for _, key in ipairs(ALL_KEYS) do redis.call('EXPIRE', key, lifetime(seconds)) end
end

-- A run that ends may owe that to others: its header's `returns` is 1 while their addresses are in the set
-- run:<id>:returns. It stays due until a worker has sent its end to each (see settled.lua).
local function owe(known, now, seconds)
  if (known or redis.call('HGET', run_key, 'returns')) ~= '1' then return end
  redis.call('ZADD', due_key, digits(now), run_id)
  if number(seconds) > 0 then redis.call('EXPIRE', run_key .. ':returns', lifetime(seconds)) end
end

local function own_wait()
  local h = fields_of(run_key, 'wait', 'v')
  return wait_of(run_key, h.wait, h.v)
end

local function waits_for_runs(wait)
  for _, call in ipairs(wait and wait.calls or {}) do
    if call[2] == '@run' then return true end
  end
end

-- A request to a run that waits for runs of its own is to reach these: a worker passes it on (see settled.lua).
local function reach(word, now)
  local wait = own_wait()
  if not waits_for_runs(wait) then return end
  redis.call('HSET', run_key, 'reach', word, 'dispatches', '0')
  redis.call('ZADD', due_key, digits(now), run_id)
  return true
end

-- Enters an end state. The caller has checked that the run is not in one. The journal of a step
-- that was not committed stays: a retry must neither pay for its answer again nor run its tools.
-- Returns true where no run of the batch is open on this shard any more.
local function finish(from, batch, a, now)
  redis.call('HSET', run_key, 'status', a.status, 'stop_reason', a.stop_reason, 'error', a.error or '',
    'outcome', a.outcome, 'token', '', 'ended', digits(now), 'updated', digits(now), 'want', '')
  if a.shortened then
    redis.call('HSET', run_key, 'shortened', a.shortened)
    count(batch, 'shortened:' .. a.shortened, 1)
  end
  redis.call('ZREM', due_key, run_id)
  relist(from, a.stop_reason, a.created)
  owe(a.returns, now, batch == '' and a.retention)
  -- The runs of a batch stay until the last of them has ended.
  if batch == '' then return seldom('retain', a.retention) end
  move(batch, from, a.status)
  count(batch, 'reason:' .. a.stop_reason, 1)
  local place = redis.call('HINCRBY', batch_key(batch), 'endings', '1')
  redis.call('ZADD', batch_key(batch) .. ':ended', digits(place), run_id)
  if redis.call('HINCRBY', batch_key(batch), 'open', '-1') == 0 then return look_at_batch(batch, now) end
  -- Workers and clients of older versions do not enter a batch; one of them may end its last run.
  redis.call('ZADD', shard .. 'over', 'NX', digits(now), batch)
end

-- A batch has a run that is open: its counters stay, and so will its other runs. Where they expire, so does their index,
-- until they have been made to stay: see expire.lua.
local function go_on(batch)
  redis.call('PERSIST', batch_key(batch))
  look_at_batch(batch, now_ms())
end

-- Makes an ended run active again in `to`: undoes what `finish` did.
local function reopen(from, to, batch)
  for _, key in ipairs(ALL_KEYS) do redis.call('PERSIST', key) end
  redis.call('PERSIST', run_key .. ':returns')
  local reason = redis.call('HGET', run_key, 'stop_reason') or ''
  local shortened = redis.call('HGET', run_key, 'shortened')
  if shortened then
    redis.call('HDEL', run_key, 'shortened')
    count(batch, 'shortened:' .. shortened, -1)
  end
  relist(list_of(from, reason), to)
  if batch == '' then return end
  move(batch, from, to)
  count(batch, 'reason:' .. reason, -1)
  count(batch, 'open', 1)
  redis.call('ZREM', batch_key(batch) .. ':ended', run_id)
  go_on(batch)
end

-- What the owner of a step was doing: 'p' and the size of its group in a process for suspects, 't'
-- where a tool was started and has not finished, else 'm'.
local function lost_at(owner, trial)
  local token, group = string.match(trial or '', '^(%S+) (%d+)$')
  if token == owner then return 'p' .. group end
  local known = {}
  for _, name in ipairs(redis.call('HKEYS', journal_key)) do known[name] = true end
  for name in pairs(known) do
    local index = string.match(name, '^s:(%d+)$')
    if index and not known['r:' .. index] and not known['o:' .. index] then return 't' end
  end
  return 'm'
end

-- Whether the owner of the open step may have made a model call that nobody knows the answer of.
local function may_have_called(owner, uncalled)
  return uncalled ~= owner and redis.call('HEXISTS', journal_key, 'response') == 0
end

-- Notes a loss that had made no call in `unpaid`: '<step> <how many of its losses>'. Returns whether it is one.
local function note_unpaid(step, owner, uncalled)
  if uncalled ~= owner then return false end
  local at, times = string.match(redis.call('HGET', run_key, 'unpaid') or '', '^(%d+) (%d+)$')
  redis.call('HSET', run_key, 'unpaid', step .. ' ' .. digits(at == tostring(step) and number(times) + 1 or 1))
  return true
end

-- The owner of a step vanished: its lease expired. It is counted here, not by the dying worker. Returns 'called', or
-- 'uncalled' where it is known to have made no call.
local function vanish(batch, owner, step, elapsed)
  redis.call('HINCRBY', run_key, 'crashes', 1)
  local known = fields_of(run_key, 'losses', 'trial', 'uncalled')
  redis.call('HSET', run_key, 'losses', with_loss(known.losses, step, owner, lost_at(owner, known.trial)))
  note_lost(batch, owner, '{"kind":"crash","step":' .. (number(step) + 1) .. ',"seconds":'
    .. (number(elapsed) / 1000) .. ',"ambiguous":' .. tostring(may_have_called(owner, known.uncalled)) .. '}')
  return note_unpaid(step, owner, known.uncalled) and 'uncalled' or 'called'
end

-- Whether the message of a run's open step still lies in the queue, as far as can be told: nobody has taken the step,
-- and it waits for nothing else. Where that message was lost, the rescuer sends another.
local function is_hinted(owner, wait) return owner == '' and not is_on(wait) end

-- Pauses a run that has no owner. `hinted` is noted for the resume, which then need not send a second message; a claim that
-- finds the run paused has used it up.
local function halt(from, batch, now, hinted)
  redis.call('HSET', run_key, 'status', 'paused', 'token', '', 'want', '', 'updated', digits(now))
  if hinted then redis.call('HSET', run_key, 'hinted', '1') end
  redis.call('ZREM', due_key, run_id)
  relist(from, 'paused')
  move(batch, from, 'paused')
  emit_status(from, 'paused')
  reach('pause', now)
end

-- The runs that the open step waits for, '<till> <run> ...'; '' for none. Those that have answered are not among them. Until
-- that time (ms) a worker may be starting one of them.
local function runs_waited_for(wait)
  local found, till = {}, 0
  for _, call in ipairs(wait and wait.calls or {}) do
    if call[2] == '@run' then
      local index = call[1]
      local key, owner, lease = unpack(redis.call('HMGET', journal_key, 'k:' .. index, 'o:' .. index, 'l:' .. index))
      if key then found[#found + 1] = key end
      if owner and owner ~= '' then till = math.max(till, number(lease)) end
    end
  end
  return #found > 0 and digits(till) .. ' ' .. table.concat(found, ' ') or ''
end

-- Nobody is to decide any more about calls that the step waited for.
local ASKS = { ['@approval'] = true, ['@person'] = true }
local function ask_of(step, index) return step .. ' ' .. index .. ' ' .. run_id end
local function drop_asks(wait, step)
  for _, call in ipairs(wait and wait.calls or {}) do
    if ASKS[call[2]] then redis.call('ZREM', shard .. 'asks', ask_of(step, call[1])) end
  end
end

-- Cancels a run that has no owner (any more: `owner` is the token of the last one, or ''). Returns 'waiting' where tool
-- calls of it may be under way. Its open step's answer was paid for; retry finds both in the journal again.
local function abandon(from, batch, step, owner, a, now)
  local paid, price = unpack(redis.call('HMGET', journal_key, 'paid', 'price'))
  if paid or price then
    note_lost(batch, 'paid', paid or price)
  elseif owner ~= '' and redis.call('HEXISTS', journal_key, 'response') == 1 then
    note_lost(batch, 'paid', '{"kind":"interrupted","step":' .. (number(step) + 1) .. ',"ambiguous":true}')
  end
  name_calls(batch)
  emit_status(from, a.status)
  finish(from, batch, a, now)
  reach('cancel', now)
  drop_asks(own_wait(), step)
  return paid and 'waiting' or ''
end

-- A request carries a token that its caller drew. The newest answers stay in the header, so that a repetition (the
-- reply to the first was lost) finds its own, and writes nothing. Returns that answer, or nil.
local REMEMBERED = 8
local function answered(token)
  for line in string.gmatch(redis.call('HGET', run_key, 'asked') or '', '[^\n]+') do
    local whose, word, detail = string.match(line, '^(%S+) (%S+) ?(.*)$')
    if whose == token then return detail ~= '' and { word, detail } or { word } end
  end
end

-- Remembers an answer under its token, and returns it.
local function answer(token, word, detail)
  local lines = { token .. ' ' .. word .. (detail and ' ' .. detail or '') }
  for line in string.gmatch(redis.call('HGET', run_key, 'asked') or '', '[^\n]+') do
    if #lines < REMEMBERED then lines[#lines + 1] = line end
  end
  redis.call('HSET', run_key, 'asked', table.concat(lines, '\n'))
  return { word, detail }
end

-- Requests to whole batches, and to the fleet, are in force once they are in this hash of the shard: `fleet` is
-- set while the fleet is paused, b:<batch> is '<word> <number>', with o:<batch> for a cancel's fields, and x:<batch>
-- is set for good once the batch was cancelled; d:<batch> is the number of the newest that is over. A request has
-- reached a run whose header has its number in `heard`.
local flags_key = shard .. 'flags'
local function pending_request(flag, heard)
  local word, n = string.match(flag or '', '^(%S+) (%S+)$')
  if n ~= heard then return word, n end
end

local function flag_of(batch, heard)
  if batch and batch ~= '' then return pending_request(redis.call('HGET', flags_key, 'b:' .. batch), heard) end
end

-- The number of the newest request to a batch, whether in force or over.
local function newest_request(batch)
  local flags = redis.call('HMGET', flags_key, 'b:' .. batch, 'd:' .. batch)
  return math.max(number(string.match(flags[1] or '', ' (%S+)$')), number(flags[2]))
end

-- The request to a run, by its header and by that to its batch which has not reached it yet.
local function wanted(want, word)
  if want == 'cancel' or word == 'cancel' then return 'cancel' end
  if word == 'pause' then return 'pause' end
  return word == 'resume' and '' or want
end

-- The fields with which the runs of a cancelled batch end; nil where they are missing, or cannot be read: then there is no
-- request. To be called before the first write.
local function ending_of(batch)
  local readable, a = pcall(cjson.decode, redis.call('HGET', flags_key, 'o:' .. batch) or '')
  if not readable or type(a) ~= 'table' then return nil end
  for _, name in ipairs({ 'status', 'stop_reason', 'outcome', 'note' }) do
    if type(a[name]) ~= 'string' then return nil end
  end
  return a
end

-- A request to this very run is newer than the one to its batch, and overrides it.
local function override_batch(batch)
  local _, n = flag_of(batch)
  if n then redis.call('HSET', run_key, 'heard', n) end
end

-- From here on, the other functions work on the run `id` of the shard.
local function turn_to(id)
  run_id, run_key = id, shard .. 'run:' .. id
  log_key, journal_key = run_key .. ':log', run_key .. ':journal'
  lost_key, events_key = run_key .. ':lost', run_key .. ':events'
  outcomes_key = run_key .. ':outcomes'
  ALL_KEYS = { run_key, log_key, journal_key, outcomes_key, lost_key, events_key }
end

-- Resumes a paused run, and returns whether no message is to be sent: one lies in the queue (see halt), or the run waits
-- for tool calls, which are dispatched again by the rescuer. The time in between does not count as time of the execution.
-- `h`: fields of the header.
local function go_again(h, grace, now)
  local to, wait = h.execution_started and 'in_progress' or 'queued', wait_of(run_key, h.wait, h.v)
  local paused = now - number(h.updated)
  if h.execution_started then
    local since = is_on(wait) and wait.uncounted and wait.since or number(h.updated)
    redis.call('HSET', run_key, 'execution_started', digits(number(h.execution_started) + now - since))
  end
  local calls = is_on(wait) and wait.reason == 'calls' and wait.calls or {}
  for _, call in ipairs(calls) do
    local index = call[1]
    local owner, till = unpack(redis.call('HMGET', journal_key, 'o:' .. index, 't:' .. index))
    if till then
      till = number(till) + paused
      redis.call('HSET', journal_key, 't:' .. index, digits(till))
    end
    -- A run may be looked after at this moment by somebody who does not know of the resume.
    local is_free = call[2] == '@run' or not owner or owner == ''
    local look = ASKS[call[2]] and till or is_free and now
    if look then redis.call('HSET', journal_key, 'n:' .. index, digits(look)) end
  end
  if #calls > 0 then
    wait.deadline = wait.deadline + paused
    set_wait(run_key, wait)
  elseif is_on(wait) and wait.reason ~= 'runs' then
    leave_wait(run_key, wait)
  end
  redis.call('HSET', run_key, 'status', to, 'updated', now, 'dispatches', 0)
  redis.call('HDEL', run_key, 'reach', 'paused_by')
  local hinted = redis.call('HDEL', run_key, 'hinted') == 1
  redis.call('ZADD', due_key, #calls > 0 and now or now + number(grace), run_id)
  relist('paused', to)
  move(h.batch, 'paused', to)
  emit_status('paused', to)
  return #calls > 0 or hinted
end

local function push(message)
  if message and message ~= '' and queue_key then redis.call('RPUSH', queue_key, message) end
end
