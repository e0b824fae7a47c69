-- Acknowledges deliveries, then takes messages and registers them as unacknowledged.
--
-- KEYS  the lists: for each priority, the most urgent first, one per queue. No others: where a script
--       reads anything, CLIENT TRACKING watches all of its KEYS, and each fetcher would be woken by
--       every message that any other takes or acknowledges.
-- ARGV  1 unacked_index (zset), 2 unacked (hash), 3 quarantine (list), 4 mark of a given-up
--       fetcher, 5 tag of this fetch, 6 messages wanted, 7 bytes after which to stop, 8 largest
--       message in bytes, 9 "1" to take from the queues in turn (else the first queue first), 10
--       number of queues, 11 entries kept in quarantine, 12 bytes of a message kept there, then per
--       queue the end of its unacked entry ("" where nothing is to be registered), then the tags to
--       acknowledge
-- returns 1 if the lists are empty now (else 0), the number of messages that went to quarantine for
--         their size, then queue number and message of each one taken; the i-th is ARGV[5]:i
-- Invariant: a message is in its list or under its tag in unacked and unacked_index, never in
--       neither, except where nothing is to be registered. A fetcher that was given up takes
--       nothing, however late its call arrives. The entries are kombu's own format
--       [message, exchange, routing key], so that stock workers restore them.
-- Lists are looked at once more after they were found empty: a connection with CLIENT TRACKING
-- then hears of the next message in any of them.

local index, unacked, quarantine = ARGV[1], ARGV[2], ARGV[3]
local fetch, wanted, budget = ARGV[5], tonumber(ARGV[6]), tonumber(ARGV[7])
local largest, in_turn, queues = tonumber(ARGV[8]), ARGV[9] == '1', tonumber(ARGV[10])

if #ARGV >= 13 + queues then
  redis.call('ZREM', index, unpack(ARGV, 13 + queues))
  redis.call('HDEL', unacked, unpack(ARGV, 13 + queues))
end

if wanted <= 0 or redis.call('EXISTS', ARGV[4]) == 1 then
  return {0, 0}
end

-- A key of another kind fails here, before anything is taken.
redis.call('ZCARD', index)
redis.call('HLEN', unacked)
local time = redis.call('TIME')
local now = time[1] .. '.' .. string.format('%06d', tonumber(time[2]))
local taken, refused = {0, 0}, 0
local dates, entries = {}, {}

local function register()
  for i = 1, #entries, 1000 do
    local last = math.min(i + 999, #entries)
    redis.call('ZADD', index, unpack(dates, i, last))
    redis.call('HSET', unacked, unpack(entries, i, last))
  end
  dates, entries = {}, {}
end

local function refuse(message, queue)
  local about = cjson.encode({
    at = tonumber(now), reason = 'larger than ' .. largest .. ' bytes',
    queue = KEYS[queue], bytes = #message,
  })
  redis.call('LPUSH', quarantine, about .. '\n' .. string.sub(message, 1, tonumber(ARGV[12])))
  redis.call('LTRIM', quarantine, 0, tonumber(ARGV[11]) - 1)
  refused = refused + 1
end

local function take(list, queue)
  local message = redis.pcall('RPOP', list)
  if not message then
    return false
  end
  if message.err then -- the list is of another kind
    register()
    return error(message)
  end
  if #message > largest then
    register() -- the quarantine may fail, too
    refuse(message, queue)
    return true
  end
  local ending = ARGV[12 + queue]
  if ending ~= '' then
    local tag = fetch .. ':' .. string.format('%d', #taken / 2)
    table.insert(dates, now)
    table.insert(dates, tag)
    table.insert(entries, tag)
    table.insert(entries, '[' .. message .. ending)
  end
  taken[#taken + 1] = queue
  taken[#taken + 1] = message
  budget = budget - #message
  return true
end

local function full()
  return #taken / 2 - 1 >= wanted or budget <= 0 or refused >= wanted
end

for first = 1, #KEYS, queues do
  local found = true
  while found and not full() do
    found = false
    for queue = 1, queues do
      while not full() and take(KEYS[first + queue - 1], queue) do
        found = true
        if in_turn then break end
      end
    end
  end
end

register()
if not full() then
  for list = 1, #KEYS do
    redis.call('EXISTS', KEYS[list])
  end
  taken[1] = 1
end
taken[2] = refused
return taken
