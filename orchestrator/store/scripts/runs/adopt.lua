-- Creates a run that begins with a log (a fork, or one read from a checkpoint), once and whole.
-- ARGV[2] digest of its contents, ARGV[3] status, ARGV[4] step, ARGV[5] grace ms, ARGV[6]
-- retention (s) of an end state, ARGV[7] message to enqueue or '', ARGV[8] events, ARGV[9] their
-- count, ARGV[10..13] numbers of values that follow for the header, the log, the outcomes, the ledger;
-- ARGV[14..] those values, each a list of field, value. A number below 0 is that of fields staged
-- before (see stage.lua): long parts come in pages.
-- Returns {'created'}, {'mine'} (the same was created before), {'exists'} (another run has the id), or
-- {'missing'} where a staged part is not complete (any more): nothing was written.
-- A run that has ended, or is paused, is not due; any other is due, at the tail of the queue.
local PARTS = { run_key, log_key, outcomes_key, lost_key }
local staged = {}
for part, key in ipairs(PARTS) do
  local fields = -number(ARGV[9 + part])
  if fields > 0 then staged[key] = { run_key .. ':new:' .. ARGV[2] .. string.sub(key, #run_key + 1), fields } end
end
if redis.call('EXISTS', run_key) == 1 or is_archived() then
  for _, one in pairs(staged) do redis.call('UNLINK', one[1]) end
  return { redis.call('HGET', run_key, 'adopted') == ARGV[2] and 'mine' or 'exists' }
end
for _, one in pairs(staged) do
  if redis.call('HLEN', one[1]) ~= one[2] then return { 'missing' } end
end
local now, status = now_ms(), ARGV[3]
local place = 14
for part, key in ipairs(PARTS) do
  -- The header's first field comes before any other write: a full Redis refuses there, and at once.
  if part > 1 then redis.call('UNLINK', key) end
  local values = math.max(number(ARGV[9 + part]), 0)
  for i = place, place + values - 1, 2 do redis.call('HSET', key, ARGV[i], ARGV[i + 1]) end
  place = place + values
  if staged[key] then
    redis.call('RENAME', staged[key][1], key)
    redis.call('PERSIST', key)
  end
end
redis.call('HSET', run_key, 'adopted', ARGV[2], 'status', status, 'step', ARGV[4], 'token', '',
  'last_token', '', 'lease', 0, 'attempt', 0, 'limited', 0, 'crashes', 0, 'dispatches', 0, 'want', '')
redis.call('HSETNX', run_key, 'created', now)
redis.call('HSETNX', run_key, 'updated', now)
redis.call('UNLINK', journal_key, events_key)
local feed = feeds()
if feed == '1' then redis.call('HSET', run_key, 'feed', feed) end
emit(ARGV[8], ARGV[9], feed)
relist('queued', list_of(status, redis.call('HGET', run_key, 'stop_reason') or ''))
if TERMINAL[status] then
  retain(ARGV[6])
elseif status ~= 'paused' then
  redis.call('ZADD', due_key, now + number(ARGV[5]), run_id)
  if ARGV[7] ~= '' and queue_key then redis.call('LPUSH', queue_key, ARGV[7]) end
end
return { 'created' }
