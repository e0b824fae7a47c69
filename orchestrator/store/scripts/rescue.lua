-- Takes up to ARGV[1] overdue runs of one shard, re-arms them, and returns those to publish.
-- KEYS[1] the shard's due index. ARGV[2] grace ms, ARGV[3] '1' while the broker queue is long.
-- Returns how many it took, then a flat list: run id, step, agent, ... of those to publish. Each run
-- is re-armed at grace x 2^n, so that a long queue is not flooded with duplicates. While it is long,
-- runs that were not begun are left in it and looked at much later; hints of begun runs go to its
-- head, so one that is overdue is lost.
local due_key = KEYS[1]
local shard = string.sub(due_key, 1, -4)
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local overdue = redis.call('ZRANGEBYSCORE', due_key, '-inf', now, 'LIMIT', 0, ARGV[1])
local out = { #overdue }
for _, run_id in ipairs(overdue) do
  local run_key = shard .. 'run:' .. run_id
  local h = redis.call('HMGET', run_key, 'status', 'step', 'agent', 'not_before')
  if h[1] == 'queued' or h[1] == 'in_progress' then
    local n = math.min(redis.call('HINCRBY', run_key, 'dispatches', 1), 8)
    local wait = tonumber(ARGV[2]) * 2 ^ (n - 1)
    local waited = (tonumber(h[4]) or 0) > 0
    local publish = ARGV[3] ~= '1' or h[1] == 'in_progress' or (waited and n == 1)
    redis.call('ZADD', due_key, now + (publish and wait or wait * 16), run_id)
    if publish then
      out[#out + 1] = run_id
      out[#out + 1] = h[2]
      out[#out + 1] = h[3]
    end
  else
    redis.call('ZREM', due_key, run_id)
  end
end
return out
