-- Takes a call out of the index of those that wait for people, unless it waits still. ARGV[2] step, ARGV[3] index.
local h = fields_of(run_key, 'status', 'step', 'wait', 'v')
if h.status and not TERMINAL[h.status] and h.step == ARGV[2] then
  local call = call_of(wait_of(run_key, h.wait, h.v), ARGV[3])
  if call and ASKS[call[2]] then return 0 end
end
return redis.call('ZREM', shard .. 'asks', ask_of(ARGV[2], ARGV[3]))
