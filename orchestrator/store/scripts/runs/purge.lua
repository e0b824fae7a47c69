-- Removes an ended run with all its records. ARGV[2] its end states, with blanks around each
-- (' ' for all), ARGV[3] ms: it ended then at the latest, ARGV[4] its batch ('' for any), ARGV[5] '1'
-- to look only.
-- Returns 1, 0 for a run that has not ended, or does not match, or -1 for one that owes its end, or a request, to other
-- runs: it goes when these know (see settled.lua).
-- Invariants: nothing is written that needs memory, so that a full Redis runs this too; a batch counts
-- the run as ended still, as it does for one that has expired.
local h = fields_of(run_key, 'status', 'ended', 'batch', 'stop_reason', 'reach', 'returns')
if not h.status or not TERMINAL[h.status] then return 0 end
if ARGV[2] ~= ' ' and not string.find(ARGV[2], ' ' .. h.status .. ' ', 1, true) then return 0 end
if number(h.ended) > number(ARGV[3]) or (ARGV[4] ~= '' and h.batch ~= ARGV[4]) then return 0 end
if h.reach or (h.returns == '1' and redis.call('EXISTS', run_key .. ':returns') == 1) then return -1 end
if ARGV[5] ~= '1' then
  redis.call('ZREM', due_key, run_id)
  redis.call('ZREM', shard .. 'runs:' .. list_of(h.status, h.stop_reason or ''), run_id)
  redis.call('UNLINK', run_key .. ':chunks', run_key .. ':chunks:attempts', run_key .. ':returns',
    unpack(ALL_KEYS))
end
return 1
