-- Takes up to ARGV[1] overdue runs of one shard, re-arms them, and returns those to publish.
-- KEYS[1] the shard's due index. ARGV[2] grace ms, ARGV[3] '1' while the broker queue is long, 'idle'
-- while it is nearly empty, else '0'. ARGV[4] how many runs may be published again that were left in a
-- long queue, ARGV[5] how many ms later than in a short one. ARGV[6] the latest time that it can be,
-- where that is known: later, the clock was set forward, and nothing is done. ARGV[7] ms until a run that waits for limits is
-- looked at again.
-- Returns how many it took, a flat list of tool calls to publish: run id, step, agent, index,
-- queue:tool, ...; a flat list of hints for the queue's end: run id, step, agent, ...; such a list of runs that owe their
-- end, or a request, to others; one of runs that wait for limits; then, flat in the reply, one for the queue's head. Each run is re-armed at grace x 2^n, so that a long queue is
-- not flooded with duplicates. While it is long, runs that were not begun are left in it and deferred: they stay in the
-- index with a time that no other comes up to, so that scans skip them. They are read when that is over, or as soon as
-- the queue is nearly empty: then their hints were lost. A few of those that have waited longest in a long queue are
-- published again at its end, and deferred for longer: one may have lost its hint while the queue stays long. Hints of
-- begun runs go to its head, so one that is overdue is lost. Those that wait for limits are as a rule not lost: the caller looks for them in their lines.
local due_key = KEYS[1]
local shard = string.sub(due_key, 1, -4)
local flags_key = shard .. 'flags'
local flagged = redis.call('EXISTS', flags_key) == 1
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
if now > (tonumber(ARGV[6]) or now) then return { 0, {}, {}, {}, {} } end

-- Whether a run that is not at work owes its end, or a request, to others.
local function owes(status, returns, reach) return status and (reach or (returns == '1' and status ~= 'paused')) end

-- While the fleet is paused, only cancelled runs without an owner go on: they end. So do those that owe their end, or a
-- request, to others. The rest stays as it is, so each call reads one page of them, and the next call the page after it.
local function cancelled_ones()
  local place_key, owing = shard .. 'rescued', {}
  local out = { 0, {}, {}, owing, {} }
  local place = tonumber(redis.call('GET', place_key)) or 0
  local found = redis.call('ZRANGEBYSCORE', due_key, '-inf', now, 'LIMIT', place, ARGV[1])
  redis.call('SET', place_key, #found < tonumber(ARGV[1]) and 0 or place + #found, 'PX', 600000)
  for _, run_id in ipairs(found) do
    local run_key = shard .. 'run:' .. run_id
    local h = fields_of(run_key, 'status', 'step', 'agent', 'token', 'want', 'returns', 'reach')
    local is_open = h.status == 'queued' or h.status == 'in_progress'
    local to = is_open and h.want == 'cancel' and out or not is_open and owes(h.status, h.returns, h.reach) and owing
    if to then
      local n = math.min(redis.call('HINCRBY', run_key, 'dispatches', 1), 8)
      redis.call('ZADD', due_key, now + tonumber(ARGV[2]) * 2 ^ (n - 1), run_id)
      for _, part in ipairs({ run_id, h.step, h.agent }) do to[#to + 1] = part end
    end
  end
  return out
end
if flagged and redis.call('HEXISTS', flags_key, 'fleet') == 1 then return cancelled_ones() end
-- Workers of the version before put runs that wait for limits beyond all others: nobody looked at them.
local EARLIER_LIMITS = 40000000000000
for _, run_id in ipairs(redis.call('ZRANGEBYSCORE', due_key, EARLIER_LIMITS, '+inf', 'LIMIT', 0, 1000)) do
  redis.call('ZADD', due_key, now, run_id)
end

local overdue = redis.call('ZRANGEBYSCORE', due_key, '-inf', now, 'LIMIT', 0, ARGV[1])
-- Added to a time, it is later than all times; sums are exact in a score.
local DEFERRED = 10000000000000
local left, till = tonumber(ARGV[1]) - #overdue, ARGV[3] == 'idle' and '+inf' or DEFERRED + now
if ARGV[3] == '1' then
  left = math.min(left, tonumber(ARGV[4]) or 0)
  till = till - (tonumber(ARGV[5]) or 0)
end
local again = {}
if left > 0 then
  for _, run_id in ipairs(redis.call('ZRANGEBYSCORE', due_key, DEFERRED, till, 'LIMIT', 0, left)) do
    overdue[#overdue + 1] = run_id
    again[run_id] = true
  end
end
-- Where nothing waits, one more hint does no harm: a run that lost several need not wait long.
local most = ARGV[3] == 'idle' and 3 or 8
local calls = {}
local behind = {}
local owing = {}
local limited = {}
local out = { #overdue, calls, behind, owing, limited }

-- A run may wait for hundreds of calls. After so many that were looked at, the rest of the runs stays
-- overdue for the next look; the reply says that there is more.
local MOST_CALLS_LOOKED_AT, looked_at = 250, 0

-- Arms a run that waits for tool calls, and returns those of its calls that have no owner.
local function look_at_calls(run_id, run_key, h, wait)
  local journal_key = run_key .. ':journal'
  local at = wait.deadline
  local n = math.min(redis.call('HINCRBY', run_key, 'dispatches', 1), 8)
  for _, call in ipairs(wait.calls) do
    local index, queue, tool = unpack(call)
    looked_at = looked_at + 1
    local till = tonumber(redis.call('HGET', journal_key, 'n:' .. index)) or 0
    if till <= now then
      till = now + tonumber(ARGV[2]) * 2 ^ (n - 1)
      redis.call('HSET', journal_key, 'n:' .. index, till)
      for _, part in ipairs({ run_id, h.step, h.agent, tostring(index), queue, tool }) do calls[#calls + 1] = part end
    end
    at = math.min(at, till)
  end
  redis.call('ZADD', due_key, at, run_id)
end

-- Whether a request to its batch keeps the run from work, and has not reached it: a sweep will apply it.
local known = {}
local function is_kept(batch, heard)
  if not flagged or not batch or batch == '' then return false end
  if known[batch] == nil then known[batch] = redis.call('HGET', flags_key, 'b:' .. batch) end
  local word, n = string.match(known[batch] or '', '^(%S+) (%S+)$')
  return n ~= nil and n ~= heard and word ~= 'resume'
end

for _, run_id in ipairs(overdue) do
  if looked_at >= MOST_CALLS_LOOKED_AT then
    out[1] = math.max(#overdue, tonumber(ARGV[1]))
    break
  end
  local run_key = shard .. 'run:' .. run_id
  local h = fields_of(run_key, 'status', 'step', 'agent', 'wait', 'v', 'token', 'batch', 'heard', 'returns', 'reach')
  local is_open = h.status == 'queued' or h.status == 'in_progress'
  local wait = is_open and h.token == '' and wait_of(run_key, h.wait, h.v) or nil
  local waits = is_on(wait)
  if is_open and is_kept(h.batch, h.heard) then
    redis.call('ZADD', due_key, now + tonumber(ARGV[2]), run_id)
  elseif waits and wait.calls and h.status == 'in_progress' and wait.deadline > now then
    look_at_calls(run_id, run_key, h, wait)
  elseif waits and wait.reason == 'limit' then
    redis.call('ZADD', due_key, now + (tonumber(ARGV[7]) or tonumber(ARGV[2])), run_id)
    for _, part in ipairs({ run_id, h.step, h.agent }) do limited[#limited + 1] = part end
  elseif is_open then
    local n = math.min(redis.call('HINCRBY', run_key, 'dispatches', 1), most)
    local later = tonumber(ARGV[2]) * 2 ^ (n - 1)
    local leave = ARGV[3] == '1' and h.status == 'queued' and not (waits and n == 1)
    redis.call('ZADD', due_key, now + (leave and DEFERRED + later * 16 or later), run_id)
    if not leave or again[run_id] then
      local to = leave and behind or out
      for _, part in ipairs({ run_id, h.step, h.agent }) do to[#to + 1] = part end
    end
  elseif owes(h.status, h.returns, h.reach) then
    local n = math.min(redis.call('HINCRBY', run_key, 'dispatches', 1), 8)
    redis.call('ZADD', due_key, now + tonumber(ARGV[2]) * 2 ^ (n - 1), run_id)
    for _, part in ipairs({ run_id, h.step, h.agent }) do owing[#owing + 1] = part end
  else
    redis.call('ZREM', due_key, run_id)
  end
end
return out
