-- Acknowledges deliveries, then takes messages and registers them as unacknowledged.
--
-- KEYS  1 unacked_index (zset), 2 unacked (hash), 3 quarantine (list), 4 mark of a given-up
--       fetcher, 5.. the lists: for each priority, the most urgent first, one per queue
-- ARGV  1 tag of this fetch, 2 messages wanted, 3 bytes after which to stop, 4 largest message in
--       bytes, 5 "1" to take from the queues in turn (else the first queue first), 6 number of
--       queues, 7 entries kept in quarantine, 8 bytes of a message kept there, then per queue the
--       end of its unacked entry ("" where nothing is to be registered), then the tags to
--       acknowledge
-- returns 1 if the lists are empty now (else 0), the number of messages that went to quarantine for
--         their size, then queue number and message of each one taken; the i-th is ARGV[1]:i
-- Invariant: a message is in its list or under its tag in unacked and unacked_index, never in
--       neither, except where nothing is to be registered. A fetcher that was given up takes
--       nothing, however late its call arrives. The entries are kombu's own format
--       [message, exchange, routing key], so that stock workers restore them.
-- Lists are looked at once more after they were found empty: a connection with CLIENT TRACKING
-- then hears of the next message in any of them.

local index, unacked, quarantine = KEYS[1], KEYS[2], KEYS[3]
local fetch, wanted, budget = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local largest, in_turn, queues = tonumber(ARGV[4]), ARGV[5] == '1', tonumber(ARGV[6])

if #ARGV >= 9 + queues then
  redis.call('ZREM', index, unpack(ARGV, 9 + queues))
  redis.call('HDEL', unacked, unpack(ARGV, 9 + queues))
end

if wanted <= 0 or redis.call('EXISTS', KEYS[4]) == 1 then
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
    queue = KEYS[4 + queue], bytes = #message,
  })
  redis.call('LPUSH', quarantine, about .. '\n' .. string.sub(message, 1, tonumber(ARGV[8])))
  redis.call('LTRIM', quarantine, 0, tonumber(ARGV[7]) - 1)
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
  local ending = ARGV[8 + queue]
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

for first = 5, #KEYS, queues do
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
  for list = 5, #KEYS do
    redis.call('EXISTS', KEYS[list])
  end
  taken[1] = 1
end
taken[2] = refused
return taken
