-- Switches the feed of a shard on, or keeps it on, and lets active runs join it, a page at a time.
-- KEYS[1] the shard's due index, ARGV[1] seconds, ARGV[2] how much a page may copy: runs looked at and
-- events that they have told so far, which the feed gets when a run joins.
-- Returns {how many runs joined, 1 if there may be more: ask again}.
-- Invariants: a run that begins while the feed is on joins by itself; of those that were active
-- before, each joins once, whoever asks and however often a page is broken off.
local due_key = KEYS[1]
local shard = string.sub(due_key, 1, -4)
local cursor_key, pending_key = shard .. 'feed:joining', shard .. 'feed:pending'
local was_on = redis.call('EXISTS', shard .. 'feed:on') == 1
redis.call('SET', shard .. 'feed:on', '1', 'EX', ARGV[1])
if not was_on then redis.call('SET', cursor_key, '0', 'EX', ARGV[1]) end

-- A scan finds every run that is in the index from its beginning to its end.
local cursor = redis.call('GET', cursor_key)
if cursor and redis.call('EXISTS', pending_key) == 0 then
  local page = redis.call('ZSCAN', due_key, cursor, 'COUNT', 100)
  for i = 1, #page[2], 2 do redis.call('RPUSH', pending_key, page[2][i]) end
  if page[1] == '0' then
    redis.call('DEL', cursor_key)
  else
    redis.call('SET', cursor_key, page[1], 'EX', ARGV[1])
  end
  redis.call('EXPIRE', pending_key, ARGV[1])
end

local joined, done, most = 0, 0, tonumber(ARGV[2])
while done < most do
  local run_id = redis.call('LPOP', pending_key)
  if not run_id then break end
  done = done + 1
  local run_key = shard .. 'run:' .. run_id
  local h = redis.call('HMGET', run_key, 'status', 'feed')
  if h[1] and h[2] ~= '1' then
    redis.call('HSET', run_key, 'feed', '1')
    for _, entry in ipairs(redis.call('XRANGE', run_key .. ':events', '-', '+')) do
      local place = redis.call('INCR', shard .. 'feed:count')
      redis.call('XADD', shard .. 'feed', 'MAXLEN', '~', '20000', '*', 'n', place, 'run', run_id, 'at', entry[1])
      done = done + 1
    end
    joined = joined + 1
  end
end
return { joined, redis.call('EXISTS', cursor_key, pending_key) > 0 and 1 or 0 }
