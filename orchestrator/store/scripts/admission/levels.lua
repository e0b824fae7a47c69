-- First part of admit.lua: what limits measure, what is left of them, and the grants. All of it is read once, and
-- written at the end. See admit.lua for KEYS and ARGV.
local prefix = string.sub(KEYS[1], 1, -6)
local settings_key, grants_key = prefix .. 'settings', prefix .. 'grants'
local waiting_key, lines_key = prefix .. 'waiting', prefix .. 'lines'
local caller, lease = ARGV[1], tonumber(ARGV[2])
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local MOST_LOOKS, MOST_ADMITTED, MOST_LINES = 128, 64, 32
local MOST_TENANTS, MOST_FLOWS = 32, 12
local SECOND_LIFE, TURN, SOON, IDLE = 1000, 500, 50, 600000
local CLASS, FAIR = 1000000000000000, 8
local SEP = '\31'
local EACH = { tenant = true, batch = true, agent = true, run = true }
local KINDS = { requests_per_minute = 'r', tokens_per_minute = 't', input_tokens_per_minute = 'i',
  output_tokens_per_minute = 'o', starts_per_minute = 's' }

local measures, states, touched, freed = {}, {}, {}, {}
local configured, texts = {}, {} -- by name: what people have set, and as it is stored
local grants, grants_changed = {}, {}
local counts, counts_changed, lines_total = {}, {}, redis.call('ZCARD', lines_key)
local admitted, was_admitted, next_ms, looks = {}, {}, nil, MOST_LOOKS
local budget = {} -- its functions are in budgets.lua
local own, round = {}, nil

local function decoded(text)
  local readable, value = pcall(cjson.decode, text or '')
  return readable and type(value) == 'table' and value or nil
end

-- A grant or an entry of a line; nothing where somebody has written something else by hand.
local function step_of(text)
  local e = decoded(text)
  local is_whole = e and tonumber(e.step) and type(e.names) == 'table' and e.names[1] and type(e.amounts) == 'table'
  for _, field in ipairs({ 'run', 'agent', 'tenant' }) do is_whole = is_whole and type(e[field]) == 'string' end
  return is_whole and e or nil
end

local function dispatch(e)
  for _, part in ipairs({ e.run, e.step, e.agent }) do admitted[#admitted + 1] = part end
end

local function soon(ms) if not next_ms or ms < next_ms then next_ms = ms end end

local function is_given(value) return value ~= nil and value ~= cjson.null end

-- What a limit measures: rates per ms, calls in flight, ms of burst, and the weight of a tenant. One that somebody has
-- written wrongly by hand lets nobody through.
local function measures_of(limit, state)
  local m = { rates = {}, cap = tonumber(limit.in_flight), weight = tonumber(limit.weight) or 1,
    burst = (tonumber(limit.burst) or 1) * 1000 }
  for field, kind in pairs(KINDS) do
    local rate = tonumber(limit[field])
    if rate and rate > 0 then m.rates[kind] = rate / 60000 elseif is_given(limit[field]) then m.cap = 0 end
  end
  if limit[1] or not m.cap and is_given(limit.in_flight) then m.cap = 0 end
  local l = state.l or {} -- see learning.lua
  for kind, rate in pairs(l.said or {}) do m.rates[kind] = math.min(m.rates[kind] or rate / 60000, rate / 60000) end
  if l.r then m.rates.r = math.min(m.rates.r or l.r / 60000, l.r / 60000) end
  return m
end

local function capacity(m, kind) return math.max(m.rates[kind] * m.burst, 1) end

-- A pause fills nothing: after it calls go out one by one, as time makes room.
local function refill(name)
  local s, m = states[name], measures[name]
  local gone = math.max(now - math.max(tonumber(s.at) or now, tonumber(s.cool) or 0), 0)
  for kind, rate in pairs(m.rates) do
    local most = capacity(m, kind)
    s[kind] = math.min(most, (tonumber(s[kind]) or most) + gone * rate)
  end
  s.at = now
end

-- Calls in flight are counted anew from the grants, in rounds: `c` of them are confirmed in this one. A count that no
-- grant has confirmed by the end of a round was left over: the grants or the levels were lost in Redis.
local function recount(name)
  local s = states[name]
  if s.n == round then return end
  local left = s.n == own.before and s.c or 0
  budget.recount(name, s.n, s.n == own.before)
  if s.n and left ~= (s.f or 0) then s.f, freed[name] = left, true end
  s.n, s.c = round, 0
end

-- Reads the limits that are not known yet, with their levels as they are now. Returns further fields of both hashes.
local function load(names, of_settings, of_state)
  local missing, fields = {}, {}
  for _, name in ipairs(names) do
    if not states[name] then
      states[name] = {}
      missing[#missing + 1] = name
      fields[#fields + 1] = name
      local kind = string.match(name, '^(%a+):')
      fields[#fields + 1] = EACH[kind] and kind .. ':*' or string.match(name, '^(.-) at ') or name
    end
  end
  if #missing == 0 and not of_settings then return end
  local asked = #missing
  for _, field in ipairs(of_settings or {}) do fields[#fields + 1] = field end
  for _, field in ipairs(of_state or {}) do missing[#missing + 1] = field end
  local found = redis.call('HMGET', settings_key, unpack(fields))
  local known = redis.call('HMGET', KEYS[1], unpack(missing))
  if of_state then
    own = decoded(known[asked + 1]) or {}
    own.round = own.round or now
    round = own.round
  end
  for i = 1, asked do
    local name, text = missing[i], found[2 * i - 1] or found[2 * i]
    local limit = decoded(text) or (text and { in_flight = 0 } or {}) -- nobody knows what it allows
    if limit.learned and not found[2 * i - 1] then text, limit = nil, {} end -- of another address
    local own_text = EACH[string.match(name, '^(%a+):')] and found[2 * i - 1] or text
    states[name], configured[name], texts[name] = decoded(known[i]) or {}, limit, own_text or ''
    local l = states[name].l
    -- Somebody has set or cleared the limit, or a worker of the release before has learned it.
    if l and (l.of ~= redis.sha1hex(texts[name]) or not l.bn) then states[name].l = nil end
    if texts[name] == '' and states[name].cool and not states[name].l then -- cleared: that ends its pause
      states[name].cool, touched[name] = nil, true
    end
    measures[name] = measures_of(limit, states[name])
    refill(name)
    budget.note(name, limit)
    recount(name)
  end
  budget.read()
  return found[2 * asked + 1], known[asked + 2]
end

local function grant_of(run)
  if grants[run] == nil then grants[run] = step_of(redis.call('HGET', grants_key, run)) or false end
  return grants[run]
end

local function set_grant(run, grant)
  grants[run], grants_changed[run] = grant, true
end

local function count_of(line)
  if not counts[line] then
    counts[line] = lines_total > 0 and tonumber(redis.call('ZSCORE', lines_key, line)) or 0
  end
  return counts[line]
end

local function count(line, by)
  counts[line] = math.max(count_of(line) + by, 0)
  counts_changed[line] = true
end

-- ------------------------------------------------------------------ buckets

local function amount(amounts, kind)
  if kind == 't' then return (amounts.i or 0) + (amounts.o or 0) end
  return amounts[kind] or 0
end

-- Whether a limit has room for a call; where not, the ms until it may have, or -1.
local function fits(name, amounts)
  local s, m = states[name], measures[name]
  local cool = tonumber(s.cool) or 0
  if cool > now then return false, cool - now, 'c' end
  local code, later = budget.short(name, amounts)
  if code then return false, later, code end
  if m.cap and (s.f or 0) + 1 > m.cap then return false, -1, 'f' end
  for kind, rate in pairs(m.rates) do
    local wanted = math.min(amount(amounts, kind), capacity(m, kind))
    if wanted > 0 and s[kind] < wanted - 0.000001 then
      return false, math.ceil((wanted - s[kind]) / rate), kind
    end
  end
  return true
end

-- Whether a budget of the grant's i-th name holds its estimate: `b` has the places of those as digits. Budgets that are
-- set while a call is under way hold nothing for it until it is confirmed.
local function is_reserved(grant, i) return string.find(grant.b or '', i, 1, true) ~= nil end

local function take(names, amounts)
  local reserved = ''
  for i, name in ipairs(names) do
    local s, m = states[name], measures[name]
    s.f = (s.f or 0) + 1
    s.c = (s.c or 0) + 1
    if s.l then s.l.n = s.l.n + 1 end
    for kind in pairs(m.rates) do s[kind] = s[kind] - amount(amounts, kind) end
    if budget.reserve(name, amounts, 1) then reserved = reserved .. i end
    budget.confirm(name, amounts, 1)
    touched[name] = true
  end
  return reserved ~= '' and reserved or nil
end

-- Ends a grant: `used` of its rates, and `spent` of its budgets.
local function give(grant, used, spent)
  load(grant.names)
  for i, name in ipairs(grant.names) do
    local s, m, reserved = states[name], measures[name], is_reserved(grant, i)
    if grant.n == round then
      s.c = math.max((s.c or 0) - 1, 0)
      if reserved then budget.confirm(name, grant.amounts, -1) end
    end
    s.f = math.max((s.f or 0) - 1, s.c or 0)
    for kind in pairs(m.rates) do
      local back = amount(grant.amounts, kind) - amount(used, kind)
      s[kind] = math.min(capacity(m, kind), s[kind] + back)
    end
    if reserved then budget.reserve(name, grant.amounts, -1) end
    budget.spend(name, spent or used)
    touched[name], freed[name] = true, true
  end
end

-- Which limit keeps a call from being made, the ms until that may change, and what of it is short.
local function blocked_by(names, amounts)
  for _, name in ipairs(names) do
    local room, ms, kind = fits(name, amounts)
    if not room then return name, ms, kind end
  end
end

