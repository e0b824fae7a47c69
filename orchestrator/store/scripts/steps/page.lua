-- Reads the next page for a claim that is not complete, and renews its lease. ARGV[2] step, ARGV[3] token, ARGV[4]
-- lease ms, ARGV[5] when the claim began (the header's `leased_at`), ARGV[6] the step at which to go on
-- in the log, or '' where that was read, ARGV[7..] names of the journal's fields to read.
-- Returns {'page', a part of the log (name, value, ...), the step at which to go on or '', fields of the
-- journal (name, value, ...), how many of the names are done}, or {'lost'}.
-- Invariant: all parts are of one log. It only grows while one claim owns the step: a rewind
-- ends that ownership first, and a later one, under the same token too, began at another time.
local h = fields_of(run_key, 'token', 'step', 'leased_at')
if h.token ~= ARGV[3] or h.step ~= ARGV[2] or h.leased_at ~= ARGV[5] then return { 'lost' } end
local now = now_ms()
local till = digits(now + number(ARGV[4]))
redis.call('HSET', run_key, 'lease', till, 'elapsed', digits(now - number(h.leased_at)))
redis.call('ZADD', due_key, till, run_id)
if ARGV[6] ~= '' then
  local log, next_step = read_part(number(ARGV[6]), number(h.step), {})
  return { 'page', log, next_step or '', {}, 0 }
end
local fields, next_place = read_journal(ARGV, 7)
return { 'page', {}, '', fields, (next_place or #ARGV + 1) - 7 }
