-- One part of the response cache. KEYS[1] is its name: all its keys begin with it.
-- ARGV[1] is the operation:
--   read   ARGV[2] key, ARGV[3] model. Returns the entry, or nothing; the read is counted.
--   keep   ARGV[2] key, ARGV[3] model, ARGV[4] ms to live, ARGV[5] bytes that the part's entries may
--          take, ARGV[6] entry. Returns 1, or 0 for one that is larger than all of that.
--   drop   ARGV[2..] keys. Returns how many of them were there.
--   clear  ARGV[2] how many at most. Returns how many went; after the last one all counters go.
--   count  Returns the counters: '<field>:<model>', number, ...
-- Invariant: what is in the index has facts ('<bytes> <model>') and is in the counters, once. Redis
-- expires entries by itself, or evicts them: they leave the index when they are met next.
local part = KEYS[1]
local index, facts, counts = part .. ':index', part .. ':facts', part .. ':counts'
local TOTAL = 'total'
local AT_ONCE = 100

local function entry_of(key) return part .. ':entry:' .. key end

local function now_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

local function count(field, by)
  if redis.call('HINCRBY', counts, field, by) == 0 then redis.call('HDEL', counts, field) end
end

local function forget(key)
  redis.call('ZREM', index, key)
  local fact = redis.call('HGET', facts, key)
  if not fact then return 0 end
  redis.call('HDEL', facts, key)
  local size, model = string.match(fact, '^(%d+) (.*)$')
  count('entries:' .. model, -1)
  count('bytes:' .. model, -size)
  count(TOTAL, -size)
  return 1
end

local function drop(key)
  redis.call('DEL', entry_of(key))
  return forget(key)
end

local function expire(now, most)
  for _, key in ipairs(redis.call('ZRANGEBYSCORE', index, '-inf', now, 'LIMIT', 0, most)) do forget(key) end
end

local operation, key, model = ARGV[1], ARGV[2], ARGV[3]

if operation == 'read' then
  local entry = redis.call('GET', entry_of(key))
  if not entry then forget(key) end
  -- A full Redis refuses to count, and gives what it has all the same.
  redis.pcall('HINCRBY', counts, (entry and 'hits:' or 'misses:') .. model, 1)
  return entry
end

if operation == 'keep' then
  local now, most, size = now_ms(), tonumber(ARGV[5]), #ARGV[6]
  if size > most then
    drop(key)
    return 0
  end
  redis.call('SET', entry_of(key), ARGV[6], 'PX', ARGV[4])
  forget(key)
  redis.call('ZADD', index, now + ARGV[4], key)
  redis.call('HSET', facts, key, size .. ' ' .. model)
  count('entries:' .. model, 1)
  count('bytes:' .. model, size)
  count(TOTAL, size)
  expire(now, AT_ONCE)
  -- Room is made by those that would expire next.
  for _ = 1, AT_ONCE do
    if tonumber(redis.call('HGET', counts, TOTAL) or 0) <= most then break end
    local next_ones = redis.call('ZRANGE', index, 0, 1)
    local first = next_ones[1] == key and next_ones[2] or next_ones[1]
    if not first then break end
    drop(first)
  end
  return 1
end

if operation == 'drop' then
  local dropped = 0
  for i = 2, #ARGV do dropped = dropped + drop(ARGV[i]) end
  return dropped
end

if operation == 'clear' then
  local keys = redis.call('ZRANGE', index, 0, ARGV[2] - 1)
  for _, one in ipairs(keys) do drop(one) end
  if #keys == 0 then redis.call('DEL', facts, counts) end
  return #keys
end

expire(now_ms(), AT_ONCE * 10)
return redis.call('HGETALL', counts)
