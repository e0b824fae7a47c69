-- Reads what the ledger has of some names on one shard: its newest part, at one moment. KEYS[1] lines that are not summed
-- yet, KEYS[2] names (see ledger.lua), KEYS[3..] rows of the newest days. ARGV[1] how many names, then these, a pattern for
-- the rows of each, and the days.
-- Returns the lines, the last day of each name (after that from which on all names are there) or false, '1' where there are
-- names at all, and rows (field, numbers, ...) of each day. A day without a name is not looked through for it.
local n, names, rows = tonumber(ARGV[1]), { '*' }, {}
for i = 1, n do names[i + 1] = ARGV[1 + i] end
local last = redis.call('ZMSCORE', KEYS[2], unpack(names))
local is_kept = redis.call('EXISTS', KEYS[2]) == 1
for k = 3, #KEYS do
  local day, found = tonumber(ARGV[2 * n + k - 1]), {}
  local is_whole = is_kept and (not last[1] or tonumber(last[1]) < day)
  for i = 1, n do
    local cursor = (not last[i + 1] and is_whole) and 'none' or '0'
    while cursor ~= 'none' do
      local page = redis.call('HSCAN', KEYS[k], cursor, 'MATCH', ARGV[1 + n + i], 'COUNT', 1000)
      for _, part in ipairs(page[2]) do found[#found + 1] = part end
      cursor = page[1] == '0' and 'none' or page[1]
    end
  end
  rows[#rows + 1] = found
end
return { redis.call('LRANGE', KEYS[1], 0, -1), last, is_kept and '1' or '', rows }
