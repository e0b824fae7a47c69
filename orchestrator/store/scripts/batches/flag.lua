-- Sets a request to a batch on one shard, or removes it when all runs have it. KEYS[1] the shard's due index, ARGV[1]
-- batch, ARGV[2] verb or '' (remove), ARGV[3] number, ARGV[4] fields of a cancel (JSON) or ''. Returns 1, or 0 where
-- a newer request is there, or this one or a newer one was removed: nothing was written. The number of the newest
-- removed one stays in d:<batch>, so that an old request never comes back.
local flags_key = string.sub(KEYS[1], 1, -4) .. 'flags'
local there = tonumber(string.match(redis.call('HGET', flags_key, 'b:' .. ARGV[1]) or '', ' (%d+)$')) or 0
local over = tonumber(redis.call('HGET', flags_key, 'd:' .. ARGV[1]) or '') or 0
local number = tonumber(ARGV[3])
if there > number or over >= number then return 0 end
if ARGV[2] == '' then
  redis.call('HDEL', flags_key, 'b:' .. ARGV[1], 'o:' .. ARGV[1])
  redis.call('HSET', flags_key, 'd:' .. ARGV[1], ARGV[3])
  return 1
end
redis.call('HSET', flags_key, 'b:' .. ARGV[1], ARGV[2] .. ' ' .. ARGV[3])
if ARGV[2] == 'cancel' then redis.call('HSET', flags_key, 'o:' .. ARGV[1], ARGV[4], 'x:' .. ARGV[1], '1') end
return 1
