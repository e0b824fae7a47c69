-- Takes a step: fence, lease, load. ARGV[2] step, ARGV[3] token (random), ARGV[4] lease ms,
-- ARGV[5] worker, ARGV[6] '1' where its model call may have to wait: it is noted that none is made until the owner says so
-- (see journal). Returns {'claimed', now, values of the header (see `read_header`), log, journal, 'called' or 'uncalled' if an
-- owner was found lost, else ''}; after these, where that is not all (see page.lua), when the claim began, the step at which
-- to go on in the log or '', and the names of the journal's fields that are left. Or {why not, ...}:
--   unknown | ended | paused | stale | ahead | leased, ms left | early, ms left
-- ('ended' and 'paused' name the status, and 'owed' where it owes that to other runs: see settled.lua; 'early' has
-- 'owed' where a worker is to look at the runs that this one waits for: see begin.lua).
-- Requests to the run's batch, or to the fleet, are applied here where they have not reached the run.
-- Invariant: at most one token owns a run, and only until its lease runs out.
-- `since` is '<step> <field> ...' where a memory policy needs no more than the log's end: the entries
-- from that step on, and those fields.
local function read_log(step, since, logged)
  local noted, size = string.match(logged or '', '^(%d+) (%d+)$')
  local small = noted == digits(step) and number(size) <= MOST_BYTES
  if since and since ~= '' then
    local first, others = string.match(since, '^(%d+) ?(.*)$')
    local names = {}
    for name in string.gmatch(others, '%S+') do names[#names + 1] = name end
    return seldom('read_part', number(first), step, names, small)
  end
  if small and redis.call('HLEN', log_key) <= MOST_FIELDS then return redis.call('HGETALL', log_key) end
  local log, on, bytes = seldom('read_part', 0, step, {}, small)
  if not on and not small then redis.call('HSET', run_key, 'logged', step .. ' ' .. digits(bytes)) end
  return log, on
end

-- The fields from OF_CALLER on are the caller's: they are in its order (see `_HEADER` in store/runs/steps.py).
local OF_CALLER, STARTED = 4, 13
local function read_header()
  return redis.call('HMGET', run_key, 'token', 'last_token', 'logged', 'status', 'step', 'want', 'batch', 'wait', 'v', 'since',
    'created', 'config', 'execution_started', 'overrides', 'slim', 'line', 'attempt', 'limited', 'crashes', 'losses', 'outcome',
    'want_note', 'tenant', 'unpriced', 'vain', 'vain_before', 'priority', 'limited_by', 'billed', 'uncalled', 'unpaid')
end

-- Fields that few claims need: each field that is read costs as much as a small command.
local function others(...) return unpack(redis.call('HMGET', run_key, ...)) end

local header = read_header()
local owner, last_token, logged, status, at, want, batch, waits, version, since, created = unpack(header, 1, 11)
local step, AN_HOUR = number(at), 3600000
if not status then return { 'unknown' } end
if TERMINAL[status] or status == 'paused' then
  local returns, passed_on = others('returns', 'reach')
  local owed = (returns == '1' or passed_on) and 'owed' or ''
  if TERMINAL[status] then return { 'ended', status, owed } end
  redis.call('HDEL', run_key, 'hinted')
  return { 'paused', status, passed_on and owed or '' }
end
local wanted_step = number(ARGV[2])
if wanted_step < step then return { 'stale', step } end
-- The store was rolled back (a lost tail, a stale replica): never run ahead of it.
if wanted_step > step then return { 'ahead', step } end
-- A repeated call that arrives after the commit of its own token, or after its death: its worker is gone.
if last_token == ARGV[3] or last_token == 'died:' .. ARGV[3] then return { 'stale', step } end
local now, found, lease, began, elapsed = now_ms(), ''
if owner ~= '' then lease, began, elapsed = others('lease', 'leased_at', 'elapsed') end
if owner ~= ARGV[3] then
  if owner ~= '' and number(lease) > now then return { 'leased', number(lease) - now } end
  local flags = redis.call('HMGET', flags_key, 'fleet', 'b:' .. (batch or ''))
  local reached = flags[2] and others('heard')
  local word, n = pending_request(flags[2], reached)
  local ending = word == 'cancel' and seldom('ending_of', batch)
  if word == 'cancel' and not ending then word, n = nil, nil end
  -- A cancel ends the run also while the fleet is paused: no model is called for that.
  if flags[1] and wanted(want, word) ~= 'cancel' then return { 'paused' } end
  if owner ~= '' then
    found = seldom('vanish', batch, owner, step, elapsed)
  end
  if n then redis.call('HSET', run_key, 'heard', n) end
  if word == 'cancel' then
    seldom('abandon', status, batch, step, owner, ending, now)
    return { 'ended', 'cancelled' }
  end
  if word == 'resume' and want == 'pause' then redis.call('HSET', run_key, 'want', '') end
  if wanted(want, word) == 'pause' then
    seldom('halt', status, batch, now)
    return { 'paused' }
  end
  local wait = wait_of(run_key, waits, version)
  if is_on(wait) then
    local is_early = wait.reason == 'runs' or wait.deadline > now
    if is_early and owner ~= '' then redis.call('HSET', run_key, 'token', '') end -- of the version before, and lost
    if wait.reason == 'runs' then return { 'early', AN_HOUR, 'owed' } end
    if wait.deadline > now then return { 'early', wait.deadline - now } end
    local execution = wait.uncounted and redis.call('HGET', run_key, 'execution_started')
    if execution then redis.call('HSET', run_key, 'execution_started', digits(number(execution) + now - wait.since)) end
    seldom('leave_wait', run_key, wait)
  elseif wait and not waits then
    seldom('set_wait', run_key, wait) -- of a worker of the version before, which was lost
  end
  local till, is_changed = digits(now + number(ARGV[4])), owner ~= '' or word or wait or ARGV[6] == '1'
  began = digits(now)
  redis.call('HSET', run_key, 'token', ARGV[3], 'lease', till, 'leased_at', began, 'elapsed', '0', 'dispatches', '0',
    'worker', ARGV[5])
  if ARGV[6] == '1' then redis.call('HSET', run_key, 'uncalled', ARGV[3]) end
  if is_changed then header = read_header() end
  local started = header[STARTED] or began
  if status ~= 'in_progress' or started == began then
    redis.call('HSET', run_key, 'status', 'in_progress', 'execution_started', started)
    header[OF_CALLER], header[STARTED] = 'in_progress', started
  end
  redis.call('ZADD', due_key, till, run_id)
  if status ~= 'in_progress' then
    relist(status, 'in_progress', created)
    move(batch, status, 'in_progress')
    emit_status(status, 'in_progress')
  end
end
local log, on = read_log(step, since, logged)
local names = redis.call('HKEYS', journal_key)
local journal, left = {}, nil
if names[1] then journal, left = seldom('read_journal', names, 1) end
local reply = { 'claimed', now, { unpack(header, OF_CALLER) }, log, journal, found }
if on or left then
  local rest = {}
  for i = left or #names + 1, #names do rest[#rest + 1] = names[i] end
  for _, part in ipairs({ began, on or '', rest }) do reply[#reply + 1] = part end
end
return reply
