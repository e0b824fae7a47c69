-- Takes one tool call of a waiting run: fence, lease, load. ARGV[2] step, ARGV[3] index, ARGV[4]
-- token (random), ARGV[5] lease ms, ARGV[6] worker. Returns {'taken', now, header, response, starts,
-- crashes, their kinds, '1' if an owner was found lost, the call's time limit (ms) or ''} or
-- {why not, ...}: unknown | ended | paused | stale | ahead | leased, ms left
-- Invariants: a call has one owner at most, and only until its lease runs out; none starts without
-- a journaled response.
local h = fields_of(run_key, 'status', 'step', 'token', 'wait', 'v', 'batch', 'heard')
local status, step, index = h.status, number(h.step), ARGV[3]
if not status then return { 'unknown' } end
if TERMINAL[status] then return { 'ended', status } end
if status == 'paused' then return { 'paused' } end
local wanted_step = number(ARGV[2])
if wanted_step < step then return { 'stale', step } end
if wanted_step > step then return { 'ahead', step } end
local j = redis.call('HMGET', journal_key, 'o:' .. index, 'l:' .. index, 'e:' .. index, 'r:' .. index,
  'response', 'x:' .. index, 'y:' .. index, 'a:' .. index)
local wait = wait_of(run_key, h.wait, h.v)
-- The step may have been claimed again, to answer the call without its result.
local call = h.token == '' and is_on(wait) and j[5] and call_of(wait, index)
local has_arrived = call and (j[4] or (j[8] and string.sub(call[2], 1, 1) == '@'))
-- A worker or client of the version before has delivered or answered it, and does not know of such waits.
if has_arrived then arrived(h, wait, index, 0, '') end
if not call or has_arrived then return { 'stale', step } end
local now, found = now_ms(), ''
if j[1] ~= ARGV[4] then
  local word = flag_of(h.batch, h.heard)
  if word == 'cancel' or word == 'pause' then return { 'paused' } end
  if redis.call('HEXISTS', flags_key, 'fleet') == 1 then
    -- Its message is gone: it is dispatched again as soon as the fleet goes on.
    if not j[1] or j[1] == '' then
      redis.call('HSET', journal_key, 'n:' .. index, digits(now))
      arm(wait)
    end
    return { 'paused' }
  end
  if redis.call('HEXISTS', log_key, 'by:' .. ARGV[4]) == 1 then return { 'stale', step } end
  if j[1] and j[1] ~= '' then
    if number(j[2]) > now then return { 'leased', number(j[2]) - now } end
    redis.call('HINCRBY', journal_key, 'c:' .. index, 1)
    local token, group = string.match(j[7] or '', '^(%S+) (%d+)$')
    local how = token == j[1] and 'p' .. group or 't'
    redis.call('HSET', journal_key, 'x:' .. index, with_loss(j[6], step, j[1], how))
    found = '1'
    note_lost(h.batch, j[1], '{"kind":"crash","step":' .. (step + 1) .. ',"seconds":' .. (number(j[3]) / 1000)
      .. ',"ambiguous":false}')
  end
  local till = now + number(ARGV[5])
  redis.call('HSET', journal_key, 'o:' .. index, ARGV[4], 'l:' .. index, till, 'n:' .. index, till, 'e:' .. index, 0,
    'w:' .. index, ARGV[6] or '')
  redis.call('HINCRBY', journal_key, 's:' .. index, 1)
  redis.call('HSET', run_key, 'dispatches', 0)
  arm(wait)
end
return { 'taken', now, redis.call('HGETALL', run_key), j[5], redis.call('HGET', journal_key, 's:' .. index),
  number(redis.call('HGET', journal_key, 'c:' .. index)), redis.call('HGET', journal_key, 'x:' .. index) or '',
  found, redis.call('HGET', journal_key, 't:' .. index) or '' }
