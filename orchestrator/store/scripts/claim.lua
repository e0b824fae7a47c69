-- Takes a step: fence, lease, load. ARGV[2] step, ARGV[3] token (random), ARGV[4] lease ms,
-- ARGV[5] worker, ARGV[6..] names of the header's fields to return. Returns
-- {'claimed', now, values of these, log, journal, '1' if an owner was found lost}, or {why not, ...}:
--   unknown | ended | paused | stale | ahead | leased, ms left | early, ms left
-- What is asked of the run's batch, or of the fleet, is done here where the run has not heard of it.
-- Invariant: at most one token owns a run, and only until its lease runs out.
-- `since` is '<step> <field> ...' where a memory policy needs no more than the log's end: the entries
-- from that step on, and those fields. Memory for the reply is bounded by the policy.
local function read_log(since, step)
  if not since or since == '' then return redis.call('HGETALL', log_key) end
  local first, others = string.match(since, '^(%d+) ?(.*)$')
  local names, log = {}, {}
  for name in string.gmatch(others, '%S+') do names[#names + 1] = name end
  for i = number(first), step do
    names[#names + 1] = tostring(i)
    names[#names + 1] = 'input:' .. i
  end
  -- Lua can pass some thousand arguments at once.
  for at = 1, #names, 1000 do
    local values = redis.call('HMGET', log_key, unpack(names, at, math.min(at + 999, #names)))
    for i, value in ipairs(values) do
      if value then
        log[#log + 1] = names[at + i - 1]
        log[#log + 1] = value
      end
    end
  end
  return log
end

local h = redis.call('HMGET', run_key, 'status', 'step', 'token', 'lease', 'want', 'batch', 'leased_at',
  'elapsed', 'not_before', 'last_token', 'since', 'heard')
local status, step, owner = h[1], number(h[2]), h[3]
if not status then return { 'unknown' } end
if TERMINAL[status] then return { 'ended', status } end
if status == 'paused' then return { 'paused' } end
local asked = number(ARGV[2])
if asked < step then return { 'stale', step } end
-- The store was rolled back (a lost tail, a stale replica): never run ahead of it.
if asked > step then return { 'ahead', step } end
-- A repeated call that arrives behind the commit of its own token, or behind its death: its worker is gone.
if h[10] == ARGV[3] or h[10] == 'died:' .. ARGV[3] then return { 'stale', step } end
local now, found = now_ms(), ''
if owner ~= ARGV[3] then
  if owner ~= '' and number(h[4]) > now then return { 'leased', number(h[4]) - now } end
  local flags = redis.call('HMGET', flags_key, 'fleet', 'b:' .. (h[6] or ''))
  local word, n = unheard(flags[2], h[12])
  local ending = word == 'cancel' and ending_of(h[6])
  if word == 'cancel' and not ending then word, n = nil, nil end
  -- A cancel ends the run also while the fleet is paused: no model is called for that.
  if flags[1] and wanted(h[5], word) ~= 'cancel' then return { 'paused' } end
  if owner ~= '' then
    vanish(h[6], owner, step, h[8])
    found = '1'
  end
  if n then redis.call('HSET', run_key, 'heard', n) end
  if word == 'cancel' then
    abandon(status, h[6], step, owner, ending, now)
    return { 'ended', 'cancelled' }
  end
  if word == 'resume' and h[5] == 'pause' then redis.call('HSET', run_key, 'want', '') end
  if wanted(h[5], word) == 'pause' then
    halt(status, h[6], now)
    return { 'paused' }
  end
  if number(h[9]) > now then return { 'early', number(h[9]) - now } end
  local began, till = digits(now), digits(now + number(ARGV[4]))
  redis.call('HSET', run_key, 'status', 'in_progress', 'token', ARGV[3], 'lease', till, 'leased_at', began,
    'elapsed', '0', 'dispatches', '0', 'not_before', '0', 'worker', ARGV[5])
  redis.call('HSETNX', run_key, 'execution_started', began)
  redis.call('ZADD', due_key, till, run_id)
  move(h[6], status, 'in_progress')
  if status ~= 'in_progress' then tell_status(status, 'in_progress') end
end
return { 'claimed', now, redis.call('HMGET', run_key, unpack(ARGV, 6)), read_log(h[11], step),
  redis.call('HGETALL', journal_key), found }
