-- Puts the runs of a page of one list right, which older workers or an expiry left wrong. KEYS[1] the shard's due index,
-- ARGV[1] the list, ARGV[2] where to go on in it ('0' at first), ARGV[3] how many to look at, about.
-- Returns where to go on, how many it looked at, and how many it removed or moved.
local shard = string.sub(KEYS[1], 1, -4)
local ENDED = { completed = true, failed = true, cancelled = true, stopped = true }
local list = shard .. 'runs:' .. ARGV[1]
local page = redis.call('ZSCAN', list, ARGV[2], 'COUNT', ARGV[3])
local moved = 0
for i = 1, #page[2], 2 do
  local id, at = page[2][i], page[2][i + 1]
  local h = fields_of(shard .. 'run:' .. id, 'status', 'stop_reason')
  local is_in = ENDED[h.status] and h.stop_reason and h.stop_reason ~= '' and h.stop_reason or h.status
  if is_in ~= ARGV[1] then
    redis.call('ZREM', list, id)
    if is_in then redis.call('ZADD', shard .. 'runs:' .. is_in, at, id) end
    moved = moved + 1
  end
end
return { page[1], #page[2] / 2, moved }
