-- Applies a request to a batch to a page of its runs on one shard. KEYS[1] the first run's header, KEYS[2]
-- the shard's due index. ARGV[2] batch, ARGV[3] number of the request, ARGV[4] grace ms, ARGV[5..] run ids.
-- Returns {'superseded'} where the request is over, or older than another, else {'swept', number of runs reached, number
-- of those that a worker holds or may make tool calls of, then run id, step, agent, ... of those to publish}.
local batch = ARGV[2]
local word, n = pending_request(redis.call('HGET', flags_key, 'b:' .. batch))
if n ~= ARGV[3] then return { 'superseded' } end
local a = word == 'cancel' and ending_of(batch)
if word == 'cancel' and not a then return { 'superseded' } end
local now = now_ms()
local reached, held, hints = 0, 0, {}

local function cancel(h, live)
  reached = reached + 1
  redis.call('HSET', run_key, 'want_note', a.note)
  if live then
    held = held + 1
    return redis.call('HSET', run_key, 'want', 'cancel')
  end
  if h[2] ~= '' then vanish(batch, h[2], h[5], h[6]) end
  if abandon(h[1], batch, h[5], h[2], a, now) ~= '' then held = held + 1 end
end

local function pause(h, live)
  if h[1] == 'paused' then return end
  if live or h[3] == 'cancel' then
    if h[3] == '' then redis.call('HSET', run_key, 'want', 'pause') end
  else
    if h[2] ~= '' then vanish(batch, h[2], h[5], h[6]) end
    halt(h[1], batch, now, is_hinted(h[2], h[11]))
  end
  reached = reached + 1
end

local function resume(h)
  if h[1] ~= 'paused' then
    if h[3] == 'pause' then redis.call('HSET', run_key, 'want', '') end
    return
  end
  reached = reached + 1
  local fields = { step = h[5], batch = batch, began = h[8], updated = h[9], waiting = h[10], not_before = h[11] }
  if not go_again(fields, ARGV[4], now) then
    for _, part in ipairs({ run_id, h[5], h[12] }) do hints[#hints + 1] = part end
  end
end

local act = ({ cancel = cancel, pause = pause, resume = resume })[word]
for i = 5, #ARGV do
  turn_to(ARGV[i])
  local h = redis.call('HMGET', run_key, 'status', 'token', 'want', 'lease', 'step', 'elapsed', 'heard',
    'execution_started', 'updated', 'waiting', 'not_before', 'agent')
  if h[1] and not TERMINAL[h[1]] and h[7] ~= n then
    redis.call('HSET', run_key, 'heard', n)
    act(h, h[2] ~= '' and number(h[4]) > now)
  end
end
return { 'swept', reached, held, unpack(hints) }
