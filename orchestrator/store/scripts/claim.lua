-- Takes a step: fence, lease, load. ARGV[2] step, ARGV[3] token (random), ARGV[4] lease ms,
-- ARGV[5] worker. Returns {'claimed', now, header, log, journal}, or {why not, ...}:
--   unknown | ended | paused | stale | ahead | leased, ms left | early, ms left
-- Invariant: at most one token owns a run, and only until its lease runs out.
local h = redis.call('HMGET', run_key, 'status', 'step', 'token', 'lease', 'want', 'batch', 'leased_at',
  'elapsed', 'not_before', 'last_token')
local status, step, owner = h[1], number(h[2]), h[3]
if not status then return { 'unknown' } end
if TERMINAL[status] then return { 'ended', status } end
if status == 'paused' then return { 'paused' } end
local asked = number(ARGV[2])
if asked < step then return { 'stale', step } end
-- The store was rolled back (a lost tail, a stale replica): never run ahead of it.
if asked > step then return { 'ahead', step } end
-- A repeated call that arrives behind the commit of its own token: its worker is gone.
if h[10] == ARGV[3] then return { 'stale', step } end
local now = now_ms()
if owner ~= ARGV[3] then
  if owner ~= '' then
    if number(h[4]) > now then return { 'leased', number(h[4]) - now } end
    -- The owner vanished. It is counted here, not by the dying worker.
    redis.call('HINCRBY', run_key, 'crashes', 1)
    local called = redis.call('HEXISTS', journal_key, 'response') == 0 and 'true' or 'false'
    note_lost(h[6], owner, '{"kind":"crash","step":' .. (step + 1) .. ',"seconds":'
      .. (number(h[8]) / 1000) .. ',"ambiguous":' .. called .. '}')
  end
  if h[5] == 'pause' then
    redis.call('HSET', run_key, 'status', 'paused', 'token', '', 'want', '', 'updated', now)
    redis.call('ZREM', due_key, run_id)
    move(h[6], status, 'paused')
    return { 'paused' }
  end
  if number(h[9]) > now then return { 'early', number(h[9]) - now } end
  redis.call('HSET', run_key, 'status', 'in_progress', 'token', ARGV[3], 'lease', now + number(ARGV[4]),
    'leased_at', now, 'elapsed', 0, 'dispatches', 0, 'not_before', 0, 'worker', ARGV[5])
  redis.call('HSETNX', run_key, 'execution_started', now)
  redis.call('ZADD', due_key, now + number(ARGV[4]), run_id)
  move(h[6], status, 'in_progress')
end
return { 'claimed', now, redis.call('HGETALL', run_key), redis.call('HGETALL', log_key),
  redis.call('HGETALL', journal_key) }
