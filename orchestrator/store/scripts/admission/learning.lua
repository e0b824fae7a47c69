-- A part of admit.lua: what providers say of a model's limits, and what their refusals show. The state of a name has
-- it as `l`: `said` (limits per minute in headers, by kind), `r` (requests per minute that refusals have left; nil where
-- `said` or what is configured holds), `top` (the rate at which it was refused), `n` calls since `from`, `w` (the last such window), `wave` (calls
-- sent before it tell nothing new), `up` and `k` (when it last grew, how often since a cut), `need` (when it last held
-- somebody up), `of` (the digest of the settings under which it was learned). Nothing ever exceeds what is configured.
local new_version
local MARK = '{"learned":1}'
local FEW, RARE = 3, 25
local TRUSTED, MINUTE = 5, 60000
local ENOUGH, SHORT, CUT_EVERY, FORGET = 10, 15000, 15000, 3600000
local MEASURED, PROBED, BLIND, LEAST_OF, LEAST, SLOW = 0.97, 0.95, 0.8, 0.3, 1, 60
local UNAWARE = 5000 -- ms in which workers that do not know of a new limit may still call

-- Behind a loss of Redis's last writes no version may come twice: it is a time.
local function change_version()
  new_version = string.format('%d%06d', clock[1], clock[2])
  redis.call('HSET', settings_key, 'version', new_version)
end

local function measure_again(name)
  measures[name], touched[name], freed[name] = measures_of(configured[name], states[name]), true, true
  refill(name)
end

-- Begins to learn about a model. One without a limit gets one, of which all workers come to know by its version.
local function begin_learning(name)
  if texts[name] == '' then
    redis.call('HSET', settings_key, name, MARK)
    change_version()
    configured[name], texts[name] = decoded(MARK), MARK
  end
  local l = { of = redis.sha1hex(texts[name]), at = now, n = 0, from = now, wave = 0, up = now, k = 0, need = now }
  states[name].l = l
  return l
end

-- What nobody may exceed: the requests per minute that are configured, or that the provider states.
local function ceiling(name)
  local set, said = tonumber(configured[name].requests_per_minute), (states[name].l.said or {}).r
  return math.min(set or math.huge, said or math.huge)
end

-- Applies the limits in an answer's headers. Beside configured limits only those count that somebody has set, and lower.
local function take_said(name, said)
  local lower, is_same = {}, true
  for field, kind in pairs(KINDS) do
    local rate, set = tonumber(said[kind]), tonumber(configured[name][field])
    if rate and (configured[name].learned or texts[name] == '' or (set and rate < set)) then lower[kind] = rate end
  end
  local l = states[name].l
  if not l and not next(lower) then return end
  l = l or begin_learning(name)
  for _, kind in pairs(KINDS) do is_same = is_same and (l.said or {})[kind] == lower[kind] end
  if is_same then return end
  if (l.said or {}).r ~= lower.r then l.r, l.top, l.n, l.from = nil, nil, 0, now end
  l.said = lower
  measure_again(name)
end

-- What is left of a rate by the provider's count: others may use the account too.
local function headers(op)
  local name = op.names[1]
  load({ name })
  if texts[name] == '' and not op.make then return 'none' end
  take_said(name, op.said)
  local s = states[name]
  for kind, left in pairs(op.left or {}) do
    if measures[name].rates[kind] and s[kind] - left >= 1 then s[kind], touched[name] = left, true end
  end
  return 'done'
end

-- The rate behind a refusal, by the window before it: the calls that it let pass, less those that are refused with it.
-- Few refusals that cost little time change nothing. Between two that are near each other the provider's bucket was
-- empty, filled, and became empty again: it let pass what it allows. Where that cannot be seen, the rate is cut blindly.
local function decide(l)
  local w, had = l.w, l.w.had or math.huge
  l.r, l.top = w.had, w.top
  if w.n >= RARE * w.x and w.ms <= w.gone / 5 then return end
  if w.n >= ENOUGH and w.gone >= 1000 and (w.gone <= SHORT or not w.had) then
    l.top = math.min(w.n / w.gone * 60000, had)
    l.r, l.k = math.max(l.top * MEASURED, (w.had or 0) * LEAST_OF), 0
  elseif not w.had then
    l.r = math.max(w.n / math.max(w.gone, 1000) * 60000, SLOW)
  elseif w.n >= ENOUGH and w.gone > SHORT then -- a rate a little too high, or a new limit, which the next wave shows
    l.r, l.top, l.k = had * PROBED, had, 0
  elseif w.at - (l.cut or 0) >= CUT_EVERY or w.at == l.cut then
    l.top = w.top or had
    l.r, l.cut, l.k = math.max(had * BLIND, l.top / 20), w.at, 0
    if w.n <= 0 then l.top = nil end -- it lets nothing pass, whatever the rate: behind that the rate grows faster
  end
end

local function begin_wave(name, ms)
  local l = states[name].l
  local had = math.min(l.r or math.huge, ceiling(name))
  l.w = { n = l.n, x = 1, gone = now - l.from, ms = ms, had = had < math.huge and had or nil, top = l.top, at = now }
  if l.n >= ENOUGH and now - l.from >= 1000 then l.n, l.from = 0, now end
end

-- The first refusals of a model without a limit: `sent` calls were made by the caller in `secs`, without a grant.
local function start(name, op)
  local l = states[name].l
  l.sent, l.secs = (l.sent or 0) + (op.sent or 0), math.max(l.secs or 1, op.secs or 0)
  l.lost = (l.lost or 0) + 1
  l.r = math.max((l.sent - l.lost) / l.secs * 60, SLOW)
end

-- Whether a refusal is one of few in a minute under a limit that somebody has set: estimates of tokens err a little. Then
-- the fleet pauses, and its rate stays.
local function is_trusted(name)
  local l = states[name].l
  if configured[name].learned then return false end
  if now - (l.since or 0) > MINUTE then l.since, l.few = now, 0 end
  l.few = l.few + 1
  return l.few <= TRUSTED
end

-- Whether the refusal may be of a call that was sent without a grant, by a worker that did not know of the limit yet,
-- while the provider states what holds: it shows nothing of the rate.
local function is_early(name)
  local l = states[name].l
  return configured[name].learned and (l.said or {}).r and now - l.at < UNAWARE
end

-- The provider has refused a call, which was sent `age` ms ago. Refusals of calls that were sent before one pause are one
-- wave. Without a wish of the provider the pauses grow while it lets nothing pass.
local function throttled(op)
  local name = op.names[1]
  load({ name })
  local s = states[name]
  local cool = tonumber(s.cool) or 0
  if op.said then take_said(name, op.said) end
  local is_first = not s.l or s.l.wave == 0
  local l = s.l or begin_learning(name)
  local is_wave = is_first or (cool <= now and now - (tonumber(op.age) or 0) >= l.wave)
  local is_open, ms = configured[name].learned and ceiling(name) == math.huge, tonumber(op.ms)
  local trusted = is_trusted(name) or is_early(name)
  l.n = math.max(l.n - 1, 0)
  if is_wave then
    local is_vain = l.n <= FEW or (l.w and l.w.n <= FEW)
    s.waves = is_vain and now - cool < 60000 and (tonumber(s.waves) or 0) + 1 or 1
    ms = ms or math.min(250 * 2 ^ s.waves, 30000)
    if not trusted and (not is_first or not (is_open or l.said)) then begin_wave(name, ms) end
  elseif l.w then
    l.w.n, l.w.x = l.w.n - 1, l.w.x + 1
  end
  if l.w and not trusted then
    decide(l)
    if l.r then l.r = math.max(l.r, LEAST) end
  end
  if is_open and not l.top and now - l.at < UNAWARE then start(name, op) end
  s.cool = math.max(cool, now + math.min(ms or 0, 3600000))
  if is_wave then l.from = l.from + math.max(s.cool - now - 1000, 0) end
  l.wave, l.up, l.need = math.max(l.wave, s.cool), s.cool, now
  s.refused = (tonumber(s.refused) or 0) + 1
  if l.r and l.r >= ceiling(name) then l.r = nil end
  measure_again(name)
  for kind in pairs(measures[name].rates) do s[kind] = math.min(s[kind], kind == 'r' and 1 or 0) end
  return 'done'
end

-- Lets a rate grow that holds somebody up: slowly where it was refused before, faster above that.
local function grow(name)
  local l = states[name].l
  if not l then return end
  l.need = now
  local is_near = l.top and l.r and l.r >= l.top * 0.95
  if not l.r or now - l.up < (is_near and 5000 or l.top and 3000 or 1000) then return end
  l.up = now
  if is_near then l.k = l.k + 1 end
  l.r = l.r * (is_near and 1 + math.min(math.max(l.k - 4, 1), 5) / 100 or l.top and 1.05 or 1.1)
  l.w = nil
  if l.top and l.r > l.top * 1.1 then l.top = nil end
  if l.r >= ceiling(name) then l.r, l.top = nil, nil end
  measure_again(name)
end

-- Forgets what nobody needs: no refusal for long, and nobody held up. Returns whether something is still known.
local function is_learned(name)
  load({ name })
  local l = states[name].l
  if not l or now - math.max(l.need, l.wave) <= FORGET then return l ~= nil end
  if configured[name].learned then
    redis.call('HDEL', settings_key, name)
    change_version()
    configured[name], texts[name] = {}, ''
  end
  states[name].l = nil
  measure_again(name)
  return false
end

