-- Removes an ended run of which a file of the archive has a copy. ARGV[2] the file's number, ARGV[3] what the copy has (see
-- below), or '' to look only, ARGV[4] until when it may go (ms). Returns {1, what it has} when it is gone; a look adds the bytes
-- of each key, 0 for one that is not there (1 where the server does not tell), {0} for a run that has not ended or is not as it was copied, {-1} for
-- one that owes its end, or a request, to other runs: it goes when these know (see settled.lua).
-- What it has are lengths, and a digest of the header where that is short: whatever changes a run that has ended changes one.
-- Invariants: as in purge.lua a batch counts the run still. Memory is freed before any is needed, so that a full Redis runs
-- this too.
local SHORT = 262144
local h = fields_of(run_key, 'status', 'stop_reason', 'batch', 'reach', 'returns', 'ended', 'updated', 'vain')
local aging = shard .. 'aging'
if not h.status and ARGV[3] ~= '' and string.match(redis.call('HGET', archived_key(), run_id) or '', '^%d+') == ARGV[2] then
  return { 1, '' } -- the reply to the first call was lost
end
if not h.status or not TERMINAL[h.status] then
  redis.call('ZREM', aging, run_id)
  return { 0 }
end
if h.reach or (h.returns == '1' and redis.call('EXISTS', run_key .. ':returns') == 1) then return { -1 } end
local has = { h.ended or '', h.updated or '', h.vain or '', redis.call('XLEN', events_key) }
for _, key in ipairs({ run_key, log_key, journal_key, outcomes_key, lost_key }) do has[#has + 1] = redis.call('HLEN', key) end
local size = 0
for _, name in ipairs({ 'slim', 'metadata', 'error', 'outcome' }) do size = size + redis.call('HSTRLEN', run_key, name) end
if size <= SHORT then has[#has + 1] = redis.sha1hex(table.concat(redis.call('HGETALL', run_key), '\0')) end
has = table.concat(has, ' ')
if ARGV[3] == '' then
  local sizes = {}
  for i, key in ipairs(ALL_KEYS) do
    local bytes = redis.pcall('MEMORY', 'USAGE', key, 'SAMPLES', 50)
    sizes[i] = bytes and (tonumber(bytes) or 1) or 0
  end
  return { 1, has, sizes }
end
if has ~= ARGV[3] or now_ms() > number(ARGV[4]) then return { 0 } end
redis.call('UNLINK', run_key .. ':chunks', run_key .. ':chunks:attempts', run_key .. ':returns', unpack(ALL_KEYS))
redis.call('ZREM', shard .. 'runs:' .. list_of(h.status, h.stop_reason or ''), run_id)
redis.call('ZREM', due_key, run_id)
redis.call('ZREM', aging, run_id)
if h.batch and h.batch ~= '' then redis.call('ZREM', batch_key(h.batch) .. ':ended', run_id) end
redis.call('HSET', archived_key(), run_id, ARGV[2] .. ' ' .. h.status)
return { 1, has }
