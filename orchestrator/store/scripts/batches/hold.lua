-- Counts runs of a batch that end with alike permanent errors in a row, and holds the batch: the request to pause it is
-- numbered and noted as by ask.lua. KEYS[1] manifest, ARGV[1] key of the cause but for its text, ARGV[2] how many of its
-- runs ended in another way, ARGV[3] how many hold it, ARGV[4] token of the step, ARGV[5] the hold for people (JSON),
-- ARGV[6] the cause's text (some hundred characters).
-- Returns {'ends', number or 0}: the run may end, and with a number it has held the batch; else {'held', number, '1' where
-- the request has not reached all runs}: the run waits.
local function words(text)
  local found = {}
  for word in string.gmatch(text, '%S+') do found[#found + 1] = word end
  return found
end

-- Whether two texts share half of the longer one's words, in their order: errors often quote a word of their input.
local function are_alike(one, other)
  local a, b, above = words(one), words(other), {}
  for i = 1, #a do
    local row = {}
    for j = 1, #b do
      local longest = math.max(above[j] or 0, row[j - 1] or 0)
      row[j] = a[i] == b[j] and (above[j - 1] or 0) + 1 or longest
    end
    above = row
  end
  return one == other or 2 * (above[#b] or 0) >= math.max(#a, #b)
end

local h = fields_of(KEYS[1], 'created', 'cancelled', 'held', 'equal', 'sweep', 'asks')
local cause, count, others, token, text = string.match(h.equal or '', '^(%S+) (%d+) (%S+) (%S+) ?(.*)$')
local number = string.match(h.held or '', '^(%d+) ') or '0'
if not h.created or h.cancelled == '1' or token == ARGV[4] then return { 'ends', number } end
if number ~= '0' then return { 'held', number, (h.sweep or '') ~= '' and '1' or '' } end
local is_next = cause == ARGV[1] and others == ARGV[2] and are_alike(text, ARGV[6])
count = is_next and tonumber(count) + 1 or 1
redis.call('HSET', KEYS[1], 'equal', table.concat({ ARGV[1], count, ARGV[2], ARGV[4], ARGV[6] }, ' '))
if count < tonumber(ARGV[3]) then return { 'ends', '0' } end
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
number = string.format('%d', math.max(now, (tonumber(h.asks or '') or 0) + 1))
redis.call('HSET', KEYS[1], 'asks', number, 'sweep', 'pause ' .. number .. ' 0', 'order', '', 'held', number .. ' ' .. ARGV[5])
return { 'ends', number }
