-- Finds runs of one shard, the newest first, in its lists `runs:<status or stop reason>`. KEYS[1] the shard's due index.
-- ARGV[1] how many to return, ARGV[2] how many to look at, both at the most; ARGV[3] the earliest time of creation (ms),
-- ARGV[4], ARGV[5] time and id of the run after which to go on ('' and '' at first), ARGV[6] a part of the error's text,
-- ARGV[7] what the header's fields are to be (JSON), ARGV[8..] lists. Returns how many it looked at, '' or the time and
-- id of the last one where it did not come to the end, then time, id, ... of those found. Writes nothing.
-- A run that is gone, or is in a list of another state (older workers keep no lists), is passed over.
local shard = string.sub(KEYS[1], 1, -4)
local CHUNK = 50
local most, looks, since, wanted = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), cjson.decode(ARGV[7])
local ENDED = { completed = true, failed = true, cancelled = true, stopped = true }
local names = {}
for name in pairs(wanted) do names[#names + 1] = name end

-- The order of the lists, from the newest: by time, then by the bytes of the id (`<` would follow a locale).
local function is_before(at, id, other, other_id)
  if at ~= other then return at > other end
  for i = 1, math.min(#id, #other_id) do
    local one, two = string.byte(id, i), string.byte(other_id, i)
    if one ~= two then return one > two end
  end
  return #id > #other_id
end

-- The place in a list after the run ARGV[5] of the time ARGV[4]; thousands may be of one time.
local function place_in(key)
  if ARGV[4] == '' then return 0 end
  local first = redis.call('ZCOUNT', key, '(' .. ARGV[4], '+inf')
  local last = first + redis.call('ZCOUNT', key, ARGV[4], ARGV[4])
  while first < last do
    local middle = math.floor((first + last) / 2)
    local id = redis.call('ZREVRANGE', key, middle, middle)[1]
    if is_before(0, ARGV[5], 0, id) then last = middle else first = middle + 1 end
  end
  return first
end

local function fill(list)
  local found = redis.call('ZREVRANGE', list.key, list.place, list.place + CHUNK - 1, 'WITHSCORES')
  list.found, list.at, list.place = found, 1, list.place + CHUNK
  list.time = tonumber(found[2])
end

local function matches(list, id)
  local h = redis.call('HMGET', shard .. 'run:' .. id, 'status', 'stop_reason', 'error', unpack(names))
  local is_in = ENDED[h[1]] and h[2] and h[2] ~= '' and h[2] or h[1]
  if is_in ~= list.name then return false end
  for i, name in ipairs(names) do
    if (h[3 + i] or '') ~= wanted[name] then return false end
  end
  return ARGV[6] == '' or string.find(string.lower(h[3] or ''), ARGV[6], 1, true) ~= nil
end

local lists = {}
for i = 8, #ARGV do
  local key = shard .. 'runs:' .. ARGV[i]
  local list = { key = key, name = ARGV[i], place = place_in(key) }
  fill(list)
  if list.time then lists[#lists + 1] = list end
end
local looked, out, last, last_id = 0, {}, '', ''
while #lists > 0 do
  local best = 1
  for i = 2, #lists do
    local one, two = lists[i], lists[best]
    if is_before(one.time, one.found[one.at], two.time, two.found[two.at]) then best = i end
  end
  local list = lists[best]
  if list.time < since then break end
  if looked >= looks or #out >= 2 * most then return { looked, last, last_id, unpack(out) } end
  last_id, last = list.found[list.at], list.found[list.at + 1]
  looked = looked + 1
  if matches(list, last_id) then
    out[#out + 1] = last
    out[#out + 1] = last_id
  end
  list.at = list.at + 2
  list.time = tonumber(list.found[list.at + 1])
  if list.at > 2 * CHUNK then fill(list) end
  if not list.time then table.remove(lists, best) end
end
return { looked, '', '', unpack(out) }
