-- The ledger of model calls: sums by day, state, tenant, agent, model and batch, on each shard.
-- <shard>costs holds lines that are not summed yet, <shard>costs:<day> the rows. A line is '<day> <numbers>', a JSON list
-- (state, tenant, agent, model, and the lane where it is not the standard one) and the batch, with line feeds between; a row is the same without the first part, and its
-- numbers: calls, input, cached, written, output, reasoning, audio tokens, 10^-9 USD, those that were saved, calls with a
-- default price, calls without a price, calls whose tokens are estimates. Days count from 1970, in UTC.
-- <shard>costs-names holds each tenant, agent and batch of the rows, by its last day, and '*', by the day from which on all
-- of them are there: what is not there has no rows since.
-- Invariant: a line is in the list, or in the sums, never in both. Lines with negative numbers take others back.
local LINES_KEPT, MOST_LINES, MOST_ROWS, DAYS_KEPT = 128, 512, 1000, 90
local MOST, DAY_MS = 9007199254740991, 86400000
local LANES = { flex = 1, priority = 1, batch = 1, window = 1, fast = 1, scale = 1, reserved = 1 }

local function add(sums, numbers)
  local i = 0
  for one in string.gmatch(numbers, '%S+') do
    i = i + 1
    local sum = sums[i] or 0
    if one ~= '0' then sum = sum + (tonumber(one) or 0) end
    sums[i] = sum > MOST and MOST or sum < -MOST and -MOST or sum
  end
end

local function joined(sums)
  local out = {}
  for i, one in ipairs(sums) do out[i] = string.format('%d', one) end
  return table.concat(out, ' ')
end

-- Adds sums to a day's rows. Beyond MOST_ROWS, new ones go without their batch, at last without all but the state.
local function add_rows(key, rows)
  local size = redis.call('HLEN', key)
  for level = 0, 2 do
    local names, values, wider = {}, {}, {}
    for name in pairs(rows) do names[#names + 1] = name end
    if #names == 0 then return end
    for i, known in ipairs(redis.call('HMGET', key, unpack(names))) do
      local name = names[i]
      if known then add(rows[name], known) end
      if known or level == 2 or size < MOST_ROWS * (2 + level) / 2 then
        if not known then size = size + 1 end
        values[#values + 1], values[#values + 2] = name, joined(rows[name])
      else
        local wide = string.match(name, '^[^\n]+') .. '\n*'
        if level == 1 then wide = string.match(name, '^%["%a+"') .. ',"*","*","*"]\n*' end
        wider[wide] = wider[wide] or {}
        add(wider[wide], joined(rows[name]))
      end
    end
    if #values > 0 then redis.call('HSET', key, unpack(values)) end
    rows = wider
  end
end

-- Notes whose the rows of a day are. The day from which on this is whole goes when no rows from before it are left.
local function note_names(costs_key, day, rows, days_kept)
  local key, members = costs_key .. '-names', {}
  local today = math.floor(redis.call('TIME')[1] * 1000 / DAY_MS)
  if redis.call('EXISTS', key) == 0 then members = { string.format('%d', today), '*' } end
  for name in pairs(rows) do
    local whose, batch = string.match(name, '^([^\n]+)\n(.*)$')
    local readable, parts = pcall(cjson.decode, whose)
    if readable then
      for kind, value in pairs({ tenant = parts[2], agent = parts[3], batch = batch }) do
        if type(value) == 'string' and value ~= '' then
          members[#members + 1], members[#members + 2] = day, kind .. ':' .. value
        end
      end
    end
  end
  for i = 1, #members, 1000 do redis.call('ZADD', key, 'GT', unpack(members, i, math.min(i + 999, #members))) end
  if days_kept then redis.call('ZREMRANGEBYSCORE', key, '-inf', string.format('%d', today - days_kept - 1)) end
  redis.call('EXPIREAT', key, string.format('%d', (today + (days_kept or DAYS_KEPT) + 2) * DAY_MS / 1000))
end

-- Sums the oldest lines of the list.
local function fold(costs_key, days_kept)
  local days = {}
  for _, line in ipairs(redis.call('LRANGE', costs_key, 0, MOST_LINES - 1)) do
    local day, cut = string.match(line, '^(%d+) '), string.find(line, '\n', 1, true)
    if day and cut and cut > #day + 2 then
      local rows, name = days[day] or {}, string.sub(line, cut + 1)
      -- Names are looked at once: by a pattern, which takes as long as all else, and most lines have one of a few.
      if rows[name] or string.find(name, '^%["%a+"[^\n]+\n[^\n]*$') then
        days[day], rows[name] = rows, rows[name] or {}
        add(rows[name], string.sub(line, #day + 2, cut - 1))
      end
    end
  end
  redis.call('LTRIM', costs_key, MOST_LINES, -1)
  for day, rows in pairs(days) do
    local key = costs_key .. ':' .. day
    note_names(costs_key, day, rows, days_kept)
    add_rows(key, rows)
    -- Clients do not know the workers' setting, and shorten nothing.
    if days_kept or redis.call('TTL', key) < 0 then
      redis.call('EXPIREAT', key, string.format('%d', (day + (days_kept or DAYS_KEPT) + 1) * DAY_MS / 1000))
    end
  end
end

-- Enters lines, with record separators between.
local function enter(costs_key, lines, days_kept)
  for line in string.gmatch(lines, '[^\30]+') do
    if redis.call('RPUSH', costs_key, line) >= LINES_KEPT then seldom('fold', costs_key, days_kept) end
  end
end

-- Whether a lost attempt's entry may be of a call that was paid: found without reading it as JSON.
local function may_be_paid(text)
  return string.find(text, '"ambiguous":true', 1, true)
    or string.find(text, '"tokens":', 1, true) and not string.find(text, '"kind":"late"', 1, true)
end

-- An entry's line; `sign` is -1 to take it back. The entry's own agent counts: it may not be the run's any more. Returns it,
-- whether its price is not known, and its numbers.
local function line_of(text, sign, tenant, agent, batch)
  local readable, e = pcall(cjson.decode, text)
  if not readable or type(e) ~= 'table' then return nil end
  local tokens, cost = tonumber(e.tokens) or 0, tonumber(e.cost_usd)
  local is_open = tokens == 0
  local usage = type(e.usage) == 'table' and e.usage or { prompt_tokens = tokens }
  local state = (is_open or e.estimated == true or not cost) and 'ambiguous' or 'lost'
  local sums = {}
  local function part(name) return tonumber(usage[name]) or 0 end
  add(sums, joined({ math.max(part('llm_calls'), 1), part('prompt_tokens'), part('cached_tokens'),
    part('cache_write_tokens'), part('completion_tokens'), part('reasoning_tokens'), part('audio_tokens'),
    math.floor(math.min(cost or 0, 1000000) * 1000000000 + 0.5), 0, e.default_priced == true and 1 or 0, is_open and 1 or 0,
    e.estimated == true and 1 or 0 }))
  for i, one in ipairs(sums) do sums[i] = one * sign end
  local model = type(e.model) == 'string' and e.model or ''
  if type(e.agent) == 'string' then agent = e.agent end
  local whose = { state, tenant or '', agent or '', model }
  if type(e.service_tier) == 'string' then whose[5] = LANES[e.service_tier] and e.service_tier or 'other' end
  local day = string.format('%d', (tonumber(e.at_ms) or 0) / DAY_MS)
  return day .. ' ' .. joined(sums) .. '\n' .. cjson.encode(whose) .. '\n' .. (batch or ''), is_open, sums
end

