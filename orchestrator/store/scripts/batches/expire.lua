-- Lets a page of a batch's ended runs on one shard expire, or stay again. KEYS[1] the shard's due index. ARGV[1] batch,
-- ARGV[2] when they expire (ms), '' to stay, or 'archive': they go when they are archived, ARGV[3] the place after which to go on ('0' at first), ARGV[4] how many
-- runs at the most, ARGV[5] the batch's score in the shard's `over` when its end was seen, or ''. Returns the place
-- that was reached, or '' where that was the last page.
-- The index expires with its runs, and before them, and stays after them: where it expires though the batch is not over
-- (a run was retried), the next look knows that runs are to stay again, also after an interrupted sweep.
local shard = string.sub(KEYS[1], 1, -4)
local counters = shard .. 'batch:' .. ARGV[1]
local function forget_end()
  local score = redis.call('ZSCORE', shard .. 'over', ARGV[1])
  if tonumber(score) == tonumber(ARGV[5]) then redis.call('ZREM', shard .. 'over', ARGV[1]) end
end
if ARGV[2] == 'archive' then
  forget_end()
  return ''
end
local function set(key)
  if ARGV[2] == '' then return redis.call('PERSIST', key) end
  return redis.call('PEXPIREAT', key, ARGV[2])
end
-- A run that was retried meanwhile keeps the counters.
local function set_counters()
  if ARGV[2] == '' or (tonumber(redis.call('HGET', counters, 'open')) or 0) <= 0 then set(counters) end
end
if ARGV[3] == '0' then set_counters() end
if ARGV[3] == '0' and ARGV[2] ~= '' then set(counters .. ':ended') end
local found = redis.call('ZRANGEBYSCORE', counters .. ':ended', '(' .. ARGV[3], '+inf', 'WITHSCORES', 'LIMIT', 0, ARGV[4])
for i = 1, #found, 2 do
  local run_key = shard .. 'run:' .. found[i]
  for _, part in ipairs({ '', ':log', ':journal', ':outcomes', ':lost', ':events', ':returns' }) do set(run_key .. part) end
end
if #found < 2 * tonumber(ARGV[4]) then
  if ARGV[2] == '' then
    set(counters .. ':ended')
    return ''
  end
  -- It may have ended again, too, between two pages; then the batch is looked at once more.
  set_counters()
  forget_end()
  return ''
end
return found[#found]
