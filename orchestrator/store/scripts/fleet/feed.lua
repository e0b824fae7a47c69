-- Switches the feed of a shard on, or keeps it on, and lets active runs join it, a page at a time.
-- KEYS[1] the shard's due index, ARGV[1] seconds, ARGV[2] how much a page may copy: runs, and
-- their events so far, which the feed gets before a run joins. A run with many or large events takes
-- several pages; the position in them is kept meanwhile.
-- Returns {how many runs joined, 1 if there may be more: call again}.
-- Invariants: a run that begins while the feed is on joins by itself; of those that were active
-- before, each joins once, no matter which caller runs it and how often a page is interrupted.
local due_key = KEYS[1]
local shard = string.sub(due_key, 1, -4)
local cursor_key, pending_key, place_key = shard .. 'feed:joining', shard .. 'feed:pending', shard .. 'feed:place'
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

local joined, done, bytes, most = 0, 0, 0, tonumber(ARGV[2])
local MOST_BYTES, AT_ONCE = 262144, 10

-- Copies the run's events from the position that was kept; returns whether that is all.
local function copied(run_id)
  local whose, after = string.match(redis.call('GET', place_key) or '', '^(.*) (%S+)$')
  local from = whose == run_id and '(' .. after or '-'
  while done < most and bytes < MOST_BYTES do
    local entries = redis.call('XRANGE', shard .. 'run:' .. run_id .. ':events', from, '+', 'COUNT', AT_ONCE)
    for _, entry in ipairs(entries) do
      local n = redis.call('INCR', shard .. 'feed:count')
      redis.call('XADD', shard .. 'feed', 'MAXLEN', '~', '20000', '*', 'n', n, 'run', run_id, 'at', entry[1])
      for _, part in ipairs(entry[2]) do bytes = bytes + #part end
    end
    done = done + #entries
    if #entries < AT_ONCE then return true end
    from = '(' .. entries[#entries][1]
  end
  redis.call('SET', place_key, run_id .. ' ' .. string.sub(from, 2), 'EX', ARGV[1])
  return false
end

while done < most and bytes < MOST_BYTES do
  local run_id = redis.call('LINDEX', pending_key, 0)
  if not run_id then break end
  local run_key = shard .. 'run:' .. run_id
  local h = fields_of(run_key, 'status', 'feed')
  if h.status and h.feed ~= '1' then
    if not copied(run_id) then break end
    redis.call('HSET', run_key, 'feed', '1')
    joined = joined + 1
  end
  done = done + 1
  redis.call('LPOP', pending_key)
  redis.call('DEL', place_key)
end
return { joined, redis.call('EXISTS', cursor_key, pending_key) > 0 and 1 or 0 }
