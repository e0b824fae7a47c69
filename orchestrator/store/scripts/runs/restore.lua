-- Brings a run back from the archive, whose keys are there with a suffix (or, with ARGV[3] '', forgets that it is there).
-- ARGV[2] the number of its file, ARGV[3] the names of its parts that were written, with blanks between, ARGV[4] the suffix.
-- Returns 1, or 0 where it is not in that file (any more), or a part has expired: nothing but those keys was changed.
local parts, archived = { [''] = true, [':log'] = true, [':journal'] = true, [':outcomes'] = true, [':lost'] = true, [':events'] = true }, archived_key()
local known = string.match(redis.call('HGET', archived, run_id) or '', '^%d+') == ARGV[2]
local written, missing = {}, false
for part in string.gmatch(ARGV[3], '%S+') do
  part = part == 'header' and '' or ':' .. part
  if parts[part] then written[#written + 1] = part end
  missing = missing or not parts[part] or redis.call('EXISTS', run_key .. part .. ARGV[4]) == 0
end
if not known or redis.call('EXISTS', run_key) == 1 or missing then
  for _, part in ipairs(written) do redis.call('UNLINK', run_key .. part .. ARGV[4]) end
  return 0
end
redis.call('HDEL', archived, run_id)
if ARGV[3] == '' then return 1 end
for _, part in ipairs(written) do
  redis.call('RENAME', run_key .. part .. ARGV[4], run_key .. part)
  redis.call('PERSIST', run_key .. part)
end
local h, now = fields_of(run_key, 'status', 'stop_reason', 'batch', 'created'), now_ms()
redis.call('ZADD', shard .. 'runs:' .. list_of(h.status, h.stop_reason or ''), h.created, run_id)
if h.batch and h.batch ~= '' then
  local place = redis.call('HINCRBY', batch_key(h.batch), 'endings', '1')
  redis.call('ZADD', batch_key(h.batch) .. ':ended', digits(place), run_id)
else
  redis.call('ZADD', shard .. 'aging', digits(now), run_id)
end
return 1
