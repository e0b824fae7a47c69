-- Notes a request to a whole batch and numbers it. KEYS[1] manifest, ARGV[1] verb, ARGV[2] token of the request,
-- ARGV[3] fields of a cancel (JSON) or ''. Returns {'asked', number} (also to a repetition), {'unknown'}, or
-- {'sweeping', verb, number, fields, row} while a cancel has only reached the runs before the row: it comes first.
-- A number is the time, or the next one: a store that lost the newest numbers does not repeat them.
local h = fields_of(KEYS[1], 'created', 'asked', 'sweep', 'order', 'asks')
if not h.created then return { 'unknown' } end
for whose, n in string.gmatch(h.asked or '', '(%S+)=(%S+)') do
  if whose == ARGV[2] then return { 'asked', n } end
end
local word, number, row = string.match(h.sweep or '', '^(%S+) (%S+) (%d+)$')
if word == 'cancel' and (h.order or '') ~= '' then return { 'sweeping', word, number, h.order, row } end
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local n = string.format('%d', math.max(now, (tonumber(h.asks or '') or 0) + 1))
local kept = { ARGV[2] .. '=' .. n }
for one in string.gmatch(h.asked or '', '%S+') do
  if #kept < 8 then kept[#kept + 1] = one end
end
redis.call('HSET', KEYS[1], 'asks', n, 'asked', table.concat(kept, ' '), 'sweep', ARGV[1] .. ' ' .. n .. ' 0', 'order', ARGV[3])
if ARGV[1] == 'cancel' then redis.call('HSET', KEYS[1], 'cancelled', '1') end
if ARGV[1] ~= 'pause' then redis.call('HDEL', KEYS[1], 'held', 'equal') end
return { 'asked', n }
