-- Takes a call out of the index of those that wait for people, unless it waits still. ARGV[2] step, ARGV[3] index.
local h = fields_of(run_key, 'status', 'step', 'waiting')
if h.status and not TERMINAL[h.status] and h.step == ARGV[2] then
  for _, call in ipairs(waits_of(h.waiting, h.step)) do
    if call[1] == ARGV[3] and ASKS[string.match(call[2], '^[^:]+')] then return 0 end
  end
end
return redis.call('ZREM', shard .. 'asks', ask_of(ARGV[2], ARGV[3]))
