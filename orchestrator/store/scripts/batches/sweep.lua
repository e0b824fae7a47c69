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
  if h.token ~= '' then vanish(batch, h.token, h.step, h.elapsed) end
  if abandon(h.status, batch, h.step, h.token, a, now) ~= '' then held = held + 1 end
end

local function pause(h, live)
  if h.status == 'paused' then return end
  if live or h.want == 'cancel' then
    if h.want == '' then redis.call('HSET', run_key, 'want', 'pause') end
  else
    if h.token ~= '' then vanish(batch, h.token, h.step, h.elapsed) end
    halt(h.status, batch, now, is_hinted(h.token, wait_of(run_key, h.wait, h.v)))
  end
  reached = reached + 1
end

local function resume(h)
  if h.status ~= 'paused' then
    if h.want == 'pause' then redis.call('HSET', run_key, 'want', '') end
    return
  end
  reached = reached + 1
  if not go_again(h, ARGV[4], now) then
    for _, part in ipairs({ run_id, h.step, h.agent }) do hints[#hints + 1] = part end
  end
end

local act = ({ cancel = cancel, pause = pause, resume = resume })[word]
for i = 5, #ARGV do
  turn_to(ARGV[i])
  local h = fields_of(run_key, 'status', 'token', 'want', 'lease', 'step', 'elapsed', 'heard', 'batch',
    'execution_started', 'updated', 'wait', 'v', 'agent')
  if h.status and not TERMINAL[h.status] and h.heard ~= n then
    redis.call('HSET', run_key, 'heard', n)
    act(h, h.token ~= '' and number(h.lease) > now)
  end
end
return { 'swept', reached, held, unpack(hints) }
