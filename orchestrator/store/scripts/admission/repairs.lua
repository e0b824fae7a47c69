-- Fifth part of admit.lua: what heals when keys of the limits are lost in Redis, a page of names at a time.

local LEAST_LOOKS = 64 -- that are left to the lines

-- Confirms a grant in this round of counting.
local function confirm(run, held)
  if held.n == round then return end
  load(held.names)
  for i, name in ipairs(held.names) do
    local s = states[name]
    s.c = (s.c or 0) + 1
    s.f = math.max(s.f or 0, s.c)
    if not is_reserved(held, i) and budget.reserve(name, held.amounts, 1) then held.b = (held.b or '') .. i end
    budget.confirm(name, held.amounts, 1)
    touched[name] = true
  end
  held.n = round
  set_grant(run, held)
end

-- After the last grant a round ends, for the next call. One takes half a lease at least.
local function end_round(state, cursor)
  if cursor ~= '0' or (now >= round and now - round < lease / 2) then return end
  state.before, state.round = round, math.max(now, round + 1)
end

-- Whether a flow is where it is looked at, or wakened from.
local function is_placed(flow, line, tenant, names)
  if redis.call('ZSCORE', flows_key(line, tenant), flow) then
    enter(line, tenant)
    return true
  end
  for _, name in ipairs(names) do
    if redis.call('ZSCORE', blocked_key(name), 'F' .. flow) then
      if not redis.call('ZSCORE', when_key, name) then at_time(name, 0) end
      return true
    end
  end
  return false
end

-- Puts flows back into the lines. Where there are none, nobody waits: runs that still have a place ask again.
local function repair(state)
  local page = redis.call('SSCAN', every_key, state.flows or '0', 'COUNT', 10)
  state.flows = page[1]
  for _, flow in ipairs(page[2]) do
    local parts = {}
    for part in string.gmatch(string.sub(flow, #prefix + 7) .. SEP, '([^' .. SEP .. ']*)' .. SEP) do parts[#parts + 1] = part end
    local line, tenant, size = parts[1], parts[2], redis.call('LLEN', flow)
    if size == 0 then
      redis.call('SREM', every_key, flow)
      lose(line)
    else
      load({ line })
      if count_of(line) < size then count(line, size - count_of(line)) end
      -- Those in front may wait no more, as they were cancelled.
      local is_gone = looks > LEAST_LOOKS and not head_of(flow, line) and is_over(flow, flows_key(line, tenant))
      if not is_gone and not is_placed(flow, line, tenant, { unpack(parts, 3) }) then open(flow, line, tenant) end
      look_at(line)
    end
  end
  if #page[2] == 0 and redis.call('EXISTS', every_key) == 0 then
    redis.call('DEL', waiting_key, lines_key)
    counts, counts_changed, lines_total = {}, {}, 0
  end
end
