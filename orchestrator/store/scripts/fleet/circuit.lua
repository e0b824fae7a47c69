-- The circuits of services, for the whole fleet. KEYS[1] hash: id -> JSON of {name, reason, state, since, next, pause,
-- tries, idle} (times in ms of Redis's clock). ARGV[1] verb, ARGV[2] id:
--   open    ARGV[3] name, ARGV[4] reason, ARGV[5] first pause ms. Opens it, or notes that it still fails.
--   probe   ARGV[3] longest pause ms, ARGV[4] 0..1. Returns 1 where it is time for a probe: the caller makes it.
--   idle    nobody waited for that probe. After ten such in a row the circuit is forgotten, as by `close`.
--   close   a probe was answered: its runs are to be woken. ARGV[3] name, for a circuit that the store has lost.
--   over    ARGV[3] ms: forgets a closed circuit after so long, when no worker takes it for open any more.
-- Returns 1 where that changed something, else 0. Two workers that open or close at once do it once.
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local verb, id = ARGV[1], ARGV[2]
local text = redis.call('HGET', KEYS[1], id)
local c = text and cjson.decode(text)
local function keep() redis.call('HSET', KEYS[1], id, cjson.encode(c)) return 1 end

if verb == 'open' then
  if c and c.state == 'open' then
    c.reason, c.idle = ARGV[4], 0
    keep()
    return 0
  end
  local pause = tonumber(ARGV[5])
  c = { name = ARGV[3], reason = ARGV[4], state = 'open', since = now, next = now + pause, pause = pause, tries = 0, idle = 0 }
  return keep()
elseif verb == 'probe' then
  if not c or c.state ~= 'open' or now < c.next and c.next - now <= tonumber(ARGV[3]) * 2 then return 0 end
  c.pause = math.min(c.pause * 2, tonumber(ARGV[3]))
  c.next = now + math.floor(c.pause * (0.8 + 0.4 * tonumber(ARGV[4])))
  c.tries = c.tries + 1
  return keep()
elseif verb == 'idle' then
  if not c or c.state ~= 'open' then return 0 end
  c.idle = c.idle + 1
  if c.idle >= 10 then c.state, c.next = 'closed', now end
  return keep()
elseif verb == 'close' then
  if c and c.state == 'closed' then return 0 end
  c = c or { name = ARGV[3], reason = '', since = now, pause = 0, tries = 0, idle = 0 }
  c.state, c.next = 'closed', now
  return keep()
elseif verb == 'over' then
  if not c or c.state ~= 'closed' or (now >= c.next and now - c.next < tonumber(ARGV[3])) then return 0 end
  return redis.call('HDEL', KEYS[1], id)
end
return 0
