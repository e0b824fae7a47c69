-- Second part of admit.lua: budgets. Of each name that has some there are what was spent in all (`spent`), today in UTC
-- (`spent:<day>`) and what grants hold (`reserved`), each as '<10^-9 USD> <tokens> <calls> <active ms>' in a hash.
-- Calls of an agent of which little is known also bring what each may take at most (`m`: USD, tokens): that is reserved for
-- them beside others, so that they do not overdraw a budget together. Once ENOUGH of its calls have ended, whoever knows
-- of them, the largest of these takes its place, for those that wait too.
-- Invariants: a call is granted where spent + reserved + its estimate fit each budget of its limits. A grant is either
-- reserved, or spent as it was settled. Numbers are whole, and exact up to 2^53. A run's budgets have nothing here: its
-- totals come with its request (`own`). A name without numbers counts nothing and admits nobody until `base` brings what
-- the ledger has: what is settled before that is in the ledger already.
local QUOTAS = { u = 'usd', k = 'tokens', n = 'calls', a = 'active_seconds' }
local QUOTA_KINDS, SCALE = { 'u', 'k', 'n', 'a' }, { u = 1000000000, k = 1, n = 1, a = 1000 }
local DAY_MS, DAYS_KEPT, IDLE_DAYS, NOTHING = 86400000, 3, 2, '0 0 0 0'
local HAS_LEDGER = { tenant = true, batch = true, agent = true }
local today = math.floor(now / DAY_MS)
local spent_key, reserved_key = prefix .. 'spent', prefix .. 'reserved'
local today_key = spent_key .. ':' .. string.format('%d', today)
local budgets, changed_budgets, unread = {}, {}, {}

local function numbers_of(text)
  local sums, i = { u = 0, k = 0, n = 0, a = 0 }, 0
  for one in string.gmatch(text or '', '%-?%d+') do
    i = i + 1
    if QUOTA_KINDS[i] then sums[QUOTA_KINDS[i]] = tonumber(one) end
  end
  return sums
end

local function text_of(sums)
  return string.format('%.0f %.0f %.0f %.0f', sums.u, sums.k, sums.n, sums.a)
end

-- Notes the budgets of a limit, to be read with those of others.
function budget.note(name, limit)
  local found, kind = nil, string.match(name, '^(%a+):')
  for code, field in pairs(QUOTAS) do
    for suffix, period in pairs({ [''] = 'all', _per_day = 'day' }) do
      local most = tonumber(limit[field .. suffix])
      if most then
        found = found or { all = {}, day = {}, hold = limit.on_budget == 'hold', is_run = kind == 'run',
          has_ledger = HAS_LEDGER[kind] }
        found[period][code] = math.floor(most * SCALE[code] + 0.5)
      end
    end
  end
  -- `run:*` is a line, of runs with budgets alone; a call without a tenant is looked at for the weight of its line.
  if not found or name == 'run:*' or name == kind .. ':' then return end
  budgets[name] = found
  if not found.is_run then unread[#unread + 1] = name end
end

function budget.read()
  if #unread == 0 then return end
  local names = unread
  unread = {}
  local all = redis.call('HMGET', spent_key, unpack(names))
  local day = redis.call('HMGET', today_key, unpack(names))
  local reserved = redis.call('HMGET', reserved_key, unpack(names))
  for i, name in ipairs(names) do
    local b = budgets[name]
    b.missing = not all[i] and b.has_ledger
    b.spent = { all = numbers_of(all[i]), day = numbers_of(day[i]) }
    b.reserved = numbers_of(b.counted or reserved[i])
    if b.counted and text_of(b.reserved) ~= (reserved[i] or NOTHING) then
      changed_budgets[name], freed[name] = true, true
    end
  end
end

-- What the first calls of agents have spent: the state has '<calls> <10^-9 USD> <tokens>' of each, the largest call's.
local ENOUGH, MOST_SEEN = 8, 100

local function seen_of(agent)
  local n, u, k = string.match((own.seen or {})[agent] or '', '^(%d+) (%d+) (%d+)$')
  return { n = tonumber(n) or 0, u = tonumber(u) or 0, k = tonumber(k) or 0 }
end

function budget.see(held, spent)
  local calls = tonumber((spent or {}).n) or 0
  if not held.amounts.m or calls < 1 then return end
  local s, size = seen_of(held.agent), 0
  for _ in pairs(own.seen or {}) do size = size + 1 end
  if size >= MOST_SEEN and s.n == 0 then own.seen = nil end
  for _, kind in ipairs({ 'u', 'k' }) do s[kind] = math.max(s[kind], math.ceil((tonumber(spent[kind]) or 0) / calls)) end
  own.seen = own.seen or {}
  own.seen[held.agent] = string.format('%.0f %.0f %.0f', math.min(s.n + calls, ENOUGH), s.u, s.k)
end

-- What a call takes of a budget beside others: at most, where that is not known better.
local function reserved_for(amounts, kind)
  local wanted, m = tonumber(amounts[kind]) or 0, amounts.m
  local seen = m and m.of and m[kind] and seen_of(m.of)
  if seen and seen.n >= ENOUGH then return math.max(wanted, seen[kind]) end
  return math.max(wanted, tonumber((m or {})[kind]) or 0)
end

-- A grant holds what it was granted with, whatever is learned since.
function budget.fix(amounts)
  local m = amounts.m
  if m and m.of then amounts.m = { u = reserved_for(amounts, 'u'), k = reserved_for(amounts, 'k') } end
end

-- What grants hold is counted anew in the rounds of the calls in flight: `h` is what this one has confirmed, nil where
-- the round had begun before the name's level or its budget. What no grant has confirmed was left over.
function budget.recount(name, n, is_next)
  local b, s = budgets[name], states[name]
  if not b or b.is_run then
    s.h = nil
    return
  end
  b.counted = n and (is_next and s.h or not is_next and NOTHING) or nil
  s.h, touched[name] = n and NOTHING, true
end

function budget.confirm(name, amounts, sign)
  local b, s = budgets[name], states[name]
  if not s.h or not b or b.is_run then return end
  local held = numbers_of(s.h)
  for _, kind in ipairs(QUOTA_KINDS) do
    held[kind] = math.max(held[kind] + sign * reserved_for(amounts, kind), 0)
    if b.reserved[kind] < held[kind] then b.reserved[kind], changed_budgets[name] = held[kind], true end
  end
  s.h = text_of(held)
end

-- Which budget of a limit has no room for a call: its code, whether only what others hold is in the way, and numbers.
-- Without others a call that fits by its estimate goes, whatever it may take at most.
local function exceeded(b, amounts)
  local waits
  for _, kind in ipairs(QUOTA_KINDS) do
    local wanted = tonumber(amounts[kind]) or 0
    for period, suffix in pairs({ all = '', day = 'd' }) do
      local most = b[period][kind]
      if most then
        local spent = b.is_run and (amounts.own or {})[kind] or (b.spent and b.spent[period][kind]) or 0
        if spent >= most or spent + wanted > most then return kind .. suffix, false, most, spent, wanted end
        local held = b.reserved and b.reserved[kind] or 0
        if held > 0 and spent + held + reserved_for(amounts, kind) > most then waits = kind .. suffix end
      end
    end
  end
  return waits, true
end

-- Why a call has to wait for a limit's budgets, and the ms until that may change by itself; nil where they have room.
function budget.short(name, amounts)
  local b = budgets[name]
  if not b then return nil end
  if b.missing then return 'w', -1 end
  local code, waits = exceeded(b, amounts)
  if not code or not waits and not b.hold then return nil end -- such a step has to be looked at, for its end
  local is_daily = not waits and string.sub(code, 2) == 'd'
  return code, is_daily and (today + 1) * DAY_MS - now or -1
end

-- Says which budget ends a run, if one does: 'over <code> <budget> <spent> <wanted> <name>'.
function budget.over(names, amounts)
  for _, name in ipairs(names) do
    local b = budgets[name]
    if b and not b.hold and not b.missing then
      local code, waits, most, spent, wanted = exceeded(b, amounts)
      if code and not waits then return string.format('over %s %.0f %.0f %.0f %s', code, most, spent, wanted, name) end
    end
  end
end

function budget.reserve(name, amounts, sign)
  local b = budgets[name]
  if not b or b.is_run then return false end
  for _, kind in ipairs(QUOTA_KINDS) do
    b.reserved[kind] = math.max(b.reserved[kind] + sign * reserved_for(amounts, kind), 0)
  end
  changed_budgets[name] = true
  return true
end

function budget.spend(name, amounts, times)
  local b = budgets[name]
  if not b or b.is_run or b.missing then return end
  for _, kind in ipairs(QUOTA_KINDS) do
    local more = (tonumber(amounts[kind]) or 0) * (times or 1)
    for _, sums in pairs(b.spent) do sums[kind] = math.max(sums[kind] + more, 0) end
  end
  changed_budgets[name] = true
end

-- Brings what the ledger has of a name that has no numbers yet.
local function base(op)
  local b = budgets[op.names[1]]
  if not b or not b.missing then return 'none' end
  b.missing = nil
  for _, kind in ipairs(QUOTA_KINDS) do
    b.spent.all[kind] = math.max(tonumber(op.all[kind]) or 0, 0)
    b.spent.day[kind] = tonumber(op.today) == today and math.max(tonumber(op.day[kind]) or 0, 0) or 0
  end
  changed_budgets[op.names[1]], freed[op.names[1]] = true, true
  return 'done'
end

-- Without grants nothing is reserved. Batches that have long ended are forgotten: the ledger knows what they spent.
local function look_at_budgets(state, size)
  if size == 0 and not next(changed_budgets) then
    redis.call('DEL', reserved_key)
    for name, b in pairs(budgets) do b.reserved, freed[name] = numbers_of(''), true end
  end
  local page = redis.call('HSCAN', spent_key, state.spending or '0', 'COUNT', 50)
  state.spending = page[1]
  for i = 1, #page[2], 2 do
    local on = tonumber(string.match(page[2][i + 1], '%d+$'))
    if string.match(page[2][i], '^batch:') and on and on + IDLE_DAYS < today then
      local held = redis.call('HGET', reserved_key, page[2][i]) or NOTHING
      if held == NOTHING and not budgets[page[2][i]] then
        redis.call('HDEL', spent_key, page[2][i])
        redis.call('HDEL', reserved_key, page[2][i])
      end
    end
  end
end

local function missing_names()
  local found = {}
  for name, b in pairs(budgets) do if b.missing then found[#found + 1] = name end end
  return found
end

local function write_budgets()
  local all, day, reserved = {}, {}, {}
  for name in pairs(changed_budgets) do
    local b = budgets[name]
    if not b.missing then
      all[#all + 1], all[#all + 2] = name, text_of(b.spent.all) .. ' ' .. string.format('%d', today)
      day[#day + 1], day[#day + 2] = name, text_of(b.spent.day)
    end
    reserved[#reserved + 1], reserved[#reserved + 2] = name, text_of(b.reserved)
  end
  for key, values in pairs({ [spent_key] = all, [today_key] = day, [reserved_key] = reserved }) do
    for i = 1, #values, 1000 do redis.call('HSET', key, unpack(values, i, math.min(i + 999, #values))) end
  end
  if #day > 0 then redis.call('EXPIRE', today_key, DAYS_KEPT * DAY_MS / 1000) end
end
