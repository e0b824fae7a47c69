-- Switches the feed of a shard on, or keeps it on. KEYS[1] the shard's due index, ARGV[1] seconds.
-- Runs that are active when it goes on are fed with what they have told so far.
-- Returns how many runs joined.
local due_key = KEYS[1]
local shard = string.sub(due_key, 1, -4)
local was_on = redis.call('EXISTS', shard .. 'feed:on') == 1
redis.call('SET', shard .. 'feed:on', '1', 'EX', ARGV[1])
if was_on then return 0 end
local joined = 0
for _, run_id in ipairs(redis.call('ZRANGE', due_key, 0, -1)) do
  local run_key = shard .. 'run:' .. run_id
  if redis.call('EXISTS', run_key) == 1 and redis.call('HGET', run_key, 'feed') ~= '1' then
    redis.call('HSET', run_key, 'feed', '1')
    for _, entry in ipairs(redis.call('XRANGE', run_key .. ':events', '-', '+')) do
      local place = redis.call('INCR', shard .. 'feed:count')
      redis.call('XADD', shard .. 'feed', 'MAXLEN', '~', '20000', '*', 'n', place, 'run', run_id, 'at', entry[1])
    end
    joined = joined + 1
  end
end
return joined
