-- A part of admit.lua: what providers say of a model's limits, and what their refusals show.
--
-- A refusal stops the call that was refused. It says something of all calls only where the share of refusals does:
--   the fleet pauses where more than half of the calls of the last windows were refused;
--   the rate is cut by that share where more are refused than are tolerated, and the sum of what is too much exceeds chance.
-- A cut leaves what was accepted. The rate then grows while it holds somebody up: slowly where it was cut, ever faster
-- while no more are refused than right after the cut. So an enforced limit is found again and again from just below it,
-- while refusals that come at any rate cost the calls which are refused. Where a second cut is refused half as often as the
-- first one left it, or more, the rate is not why: it is as before, and that share is tolerated for a while. Limits that a
-- provider states come first, and nothing ever exceeds those that are configured.
--
-- The state of a name has this as `l`: `said` (limits per minute that the provider states, by kind), `r` (requests per
-- minute that refusals have left; nil where nothing was cut), `top` (what was accepted at the last cut, where that could
-- be measured), `n` calls and `x` refusals of the window since `from`, `pn` and `px` of the one before (since `began`),
-- `peak` the highest rate that was accepted (it fades), `e` refusals beyond those tolerated (`room`: how many fewer there were; `before` the last pause), `fresh` (no window has ended since a pause),
-- `held` (somebody was held up in the window), `last` (the last cut; `grown`: at a rate that was about right), `ends` (windows since), `k` (how often it grew since
-- without trouble), `bn` and `bx` (calls and refusals right after cuts), `t` (the share that is tolerated), `high` (rate
-- and share behind a cut, for the next one), `paused` (when), `need` (when it last held somebody up or refused), `of` (the
-- digest of the settings under which it was learned), `wave` and `up` (for workers of the release before).
local new_version
local MARK = '{"learned":1}'
local FORGET, UNAWARE = 3600000, 5000 -- ms; in the second workers that do not know of a new limit may still call
local learn = { -- bounds, and the functions of this part
  WINDOW = 2000, SHORT = 1000, LONG = 20000, IDLE = 8000, CALLS = 20, -- ms and calls of a window
  TOLERATED = 0.07, MOST_TOLERATED = 0.45, MARGIN = 0.03, SPREAD = 1.3, SURE = 4, SURE_SHARE = 0.02,
  ALIKE = 0.5, FEW = 3, ENOUGH = 10, MANY = 30, LEAST_OF = 0.3, NEAR = 0.85, KEPT = 0.97, LEAST = 1, SLOW = 60,
  FAST = 0.25, PAUSE = 250, LONGEST = 30000, LONGEST_WITH_WISH = 8000, LONGEST_WISH = 3600000,
}

-- After a loss of Redis's last writes no version may come twice: it is a time.
local function change_version()
  new_version = string.format('%d%06d', clock[1], clock[2])
  redis.call('HSET', settings_key, 'version', new_version)
end

local function measure_again(name)
  measures[name], touched[name], freed[name] = measures_of(configured[name], states[name]), true, true
  refill(name)
end

function learn.begin_window(l, at)
  l.n, l.x, l.pn, l.px, l.e, l.room, l.from, l.began, l.before, l.held, l.fresh = 0, 0, 0, 0, 0, 0, at, at, nil, nil, true
end

-- Begins to learn about a model. One without a limit gets one, of which all workers come to know by its version.
function learn.begin(name)
  if texts[name] == '' then
    redis.call('HSET', settings_key, name, MARK)
    change_version()
    configured[name], texts[name] = decoded(MARK), MARK
  end
  local l = { of = redis.sha1hex(texts[name]), at = now, need = now, t = learn.TOLERATED, bn = 0, bx = 0, ends = 0, k = 0,
    wave = 0, up = now }
  learn.begin_window(l, now)
  l.n = states[name].f or 0 -- the refused call is one of those
  states[name].l = l
  return l
end

-- What nobody may exceed: the requests per minute that are configured, or that the provider states.
function learn.ceiling(name)
  local set, said = tonumber(configured[name].requests_per_minute), (states[name].l.said or {}).r
  return math.min(set or math.huge, said or math.huge)
end

-- Whether somebody has switched it off: then only those wait whose calls are refused.
function learn.is_off(name) return configured[name].learn == false end

-- Applies the limits in an answer. Next to configured limits only those count that somebody has set, and lower.
function learn.take_said(name, said)
  local lower, is_same = {}, true
  for field, kind in pairs(KINDS) do
    local rate, set = tonumber(said[kind]), tonumber(configured[name][field])
    if rate and (configured[name].learned or texts[name] == '' or (set and rate < set)) then lower[kind] = rate end
  end
  local l = states[name].l
  if not l and not next(lower) then return end
  l = l or learn.begin(name)
  for _, kind in pairs(KINDS) do is_same = is_same and (l.said or {})[kind] == lower[kind] end
  if is_same then return end
  if (l.said or {}).r ~= lower.r then l.r, l.top, l.last, l.high = nil, nil, nil, nil end
  l.said = lower
  measure_again(name)
end

-- What is left of a rate by the provider's count: others may use the account too.
function learn.headers(op)
  local name = op.names[1]
  load({ name })
  if (texts[name] == '' and not op.make) or learn.is_off(name) then return 'none' end
  learn.take_said(name, op.said)
  local s = states[name]
  for kind, left in pairs(op.left or {}) do
    if measures[name].rates[kind] and s[kind] - left >= 1 then s[kind], touched[name] = left, true end
  end
  return 'done'
end

-- What a cut leaves: the rate at which calls were refused, less the share of those. Where hardly anything passed, and
-- where the time was short, that says little of what is allowed: `top` is not known then. A rate that had grown, or whose top was
-- known, is about right: few refusals take little of it.
function learn.apply(l)
  local cut = l.last
  local passed = cut.n - cut.x
  local r = cut.had * math.max(passed / cut.n, passed < learn.ENOUGH and (cut.grown and learn.NEAR or learn.LEAST_OF) or 0)
  local is_measured = cut.grown or passed >= learn.MANY or (passed >= learn.ENOUGH and cut.ms >= learn.WINDOW)
  l.top, l.r = is_measured and r or nil, math.max(r * learn.KEPT, learn.LEAST)
end

-- Whether cuts are of no use: as many are refused where less is sent than was accepted before. An enforced limit refuses next
-- to nothing there. Only what is seen after a cut, at one rate, is compared (`high` has the first of it): at a first
-- cut the rate may still have grown. Half and more is a pause, and no chance. A share that was tolerated needs no first cut.
function learn.is_vain(l, share)
  local high = l.high
  if high and l.k < 2 and share >= learn.ALIKE * high.share and share < 0.5 then
    return l.r <= high.r * (1 - high.share)
  end
  local is_known = l.t > learn.TOLERATED or (l.last and l.k < 2 and share < 0.5)
  l.high = l.r and is_known and { r = l.r, share = l.t > learn.TOLERATED and math.min(share, l.t) or share } or nil
  l.t = learn.TOLERATED
end

function learn.cut(name)
  local l = states[name].l
  local n, x, ms, high = l.n + l.pn, l.x + l.px, now - l.began, l.high
  local share, had = x / n, math.min(l.r or math.huge, learn.ceiling(name))
  if had == math.huge then had = math.max(n / math.max(ms, learn.SHORT) * 60000, l.peak or 0, learn.SLOW) end
  if learn.is_vain(l, share) then
    l.t = math.min(1.5 * math.max(share, high.share), learn.MOST_TOLERATED)
    l.r, l.k, l.top, l.last, l.high = math.max(high.r, l.peak or 0), 0, nil, nil, nil
    if l.r >= learn.ceiling(name) then l.r = nil end
  else
    l.last = { n = n, x = x, had = had, at = now, ms = ms, grown = l.k > 3 or l.top ~= nil }
    l.k, l.ends, l.bn, l.bx = 0, 0, l.bn / 2, l.bx / 2
    learn.apply(l)
  end
  learn.begin_window(l, now)
end

-- The share of refusals that has nothing to do with the rate: it is what there is right after cuts.
function learn.base(l) return learn.SPREAD * (l.bx + 1) / (l.bn + 2 * learn.CALLS) end

function learn.tolerated(l)
  return l.t > learn.TOLERATED and l.t or math.min(l.t, learn.base(l) + learn.MARGIN)
end

-- Refusals beyond those that are tolerated, and whether they are too many for chance.
function learn.excess(l) return l.e + l.x - learn.tolerated(l) * l.n end

-- Right after the beginning calls without a grant use up what the provider states: that shows nothing of the rate.
function learn.is_early(name)
  local l = states[name].l
  return configured[name].learned and (l.said or {}).r and now - l.at < UNAWARE
end

function learn.is_sure(l) return learn.excess(l) > learn.SURE + learn.SURE_SHARE * (l.n + l.pn) end

function learn.grow(name)
  local l = states[name].l
  local is_clean = l.x <= learn.base(l) * l.n
  if is_clean then l.k = l.k + 1 end
  local percent = is_clean and math.max(math.min(2 ^ (l.k - 2), l.k > 6 and 8 or 4), 1) or 1
  l.r = l.r * (l.top and l.r >= l.top * 0.95 and 1 + percent / 100 or 1 + learn.FAST * math.min(l.n / 5, 1))
  if l.top and l.r > l.top * 1.5 then l.top = nil end
  if l.r >= learn.ceiling(name) then l.r, l.top = nil, nil end
  measure_again(name)
end

-- After a cut and after a pause calls go out one by one.
function learn.calm(name)
  measure_again(name)
  local s = states[name]
  for kind in pairs(measures[name].rates) do s[kind] = math.min(s[kind], kind == 'r' and 1 or 0) end
end

-- Ends a window that is long enough. Where nothing is refused and nobody knows what is allowed, a second is.
function learn.look(name)
  local l = states[name].l
  local ms = l and now - l.from
  if not l or l.n == 0 or ms < (l.top and learn.WINDOW or learn.SHORT) then return end
  if l.n < learn.CALLS and ms < learn.LONG and (l.top or l.x > 0) then return end
  if learn.is_early(name) then
    l.e, l.x = 0, 0
  elseif learn.is_sure(l) then
    learn.cut(name)
    learn.calm(name)
    return
  end
  local excess, is_idle = learn.excess(l), ms > learn.IDLE and not l.held
  local accepted = l.n - l.x + l.pn - l.px
  l.peak = math.max(accepted / math.max(now - l.began, learn.SHORT) * 60000, (l.peak or 0) * 0.99)
  if l.last and l.ends < 2 then l.bn, l.bx = l.bn + l.n, l.bx + l.x end
  if l.r and l.held and l.x <= learn.tolerated(l) * l.n then learn.grow(name) end
  l.ends, l.t = l.ends + 1, math.max(l.t * 0.99, learn.TOLERATED)
  if l.pn > 0 then l.began = l.from end -- else calls that were sent without a grant count since then
  l.pn, l.px, l.e, l.room = l.n, l.x, math.max(excess, 0), math.max(-excess, 0)
  l.n, l.x, l.from, l.held, l.fresh = 0, 0, now, nil, nil
  if is_idle then l.pn, l.px, l.began = 0, 0, now end
end

-- Somebody is held up by the rate.
function learn.hold_up(name)
  local l = states[name].l
  if not l then return end
  l.need, l.held = now, true
  learn.look(name)
end

-- Counts a refusal where its call was: after the last cut, in this window, in the one before. `sent` calls were made
-- without a grant in `secs`, by a worker that did not know of the limit.
function learn.note(l, op)
  local at = now - math.max(tonumber(op.age) or 0, 0)
  if op.sent then
    l.n, l.began = l.n + op.sent, math.min(l.began, now - (tonumber(op.secs) or 1) * 1000)
    if l.last then l.last.n = l.last.n + op.sent end
  end
  if l.last and at < l.last.at then
    if l.ends > 0 then return end
    l.last.x = math.min(l.last.x + 1, l.last.n)
    learn.apply(l)
  elseif at < (l.paused or 0) then
    l.px = math.min(l.px + 1, l.pn)
  elseif at < l.from and l.pn > 0 then
    l.px = l.px + 1
    if l.room >= 1 then l.room = l.room - 1 else l.e = l.e + 1 end
  else
    l.x = l.x + 1
  end
end

-- Pauses the fleet where refusals agree, and lets a pause last as long as others ask. A wave after a pause of which
-- nothing passed says nothing of the rate, and the next pause is longer. Returns whether the fleet pauses.
function learn.pause(name, ms)
  local s, l = states[name], states[name].l
  local cool, n, x = tonumber(s.cool) or 0, l.n, l.x
  if cool > now then
    s.cool = math.max(cool, now + (ms or 0))
    return true
  end
  if not l.fresh then n, x = n + l.pn, x + l.px end
  if x < learn.FEW or x <= n / 2 then return false end
  local is_vain = l.fresh and l.pn > 0 and l.px >= l.pn
  s.waves = is_vain and now - cool < 60000 and (tonumber(s.waves) or 0) + 1 or 1
  if is_vain then l.e = l.before or 0 end
  s.cool = now + math.max(ms or 0, math.min(learn.PAUSE * 2 ^ s.waves, ms and learn.LONGEST_WITH_WISH or learn.LONGEST))
  return true
end

-- Whether a rate may be cut by now: what is behind a cut has been seen, and it is known how many calls there were.
function learn.may_cut(name, is_paused)
  local l = states[name].l
  if (l.last and l.ends == 0 and not is_paused) or l.n < learn.FEW or l.x >= l.n then return false end
  if learn.is_early(name) then return false end
  if not is_paused and l.n + l.pn < learn.CALLS then return false end
  return is_paused or l.r or learn.ceiling(name) < math.huge or now - l.began >= learn.SHORT
end

-- The provider has refused a call, which was sent `age` ms ago. Returns whether the fleet waits, or the call alone.
function learn.throttled(op)
  local name = op.names[1]
  load({ name })
  local s, ms = states[name], tonumber(op.ms)
  s.refused, touched[name] = (tonumber(s.refused) or 0) + 1, true
  if learn.is_off(name) then return 'alone' end
  if op.said then learn.take_said(name, op.said) end
  local l = s.l or learn.begin(name)
  l.need = now
  learn.look(name)
  learn.note(l, op)
  local is_paused = learn.pause(name, ms and math.min(math.max(ms, 0), learn.LONGEST_WISH))
  local cuts = learn.may_cut(name, is_paused) and learn.is_sure(l)
  if cuts then learn.cut(name) end
  if is_paused then
    if l.n > 0 then
      l.before, l.e, l.room = l.e, learn.is_early(name) and 0 or math.max(learn.excess(l), 0), 0
      l.pn, l.px = l.n + (l.fresh and 0 or l.pn), l.x + (l.fresh and 0 or l.px)
    end
    l.n, l.x, l.held, l.fresh, l.paused = 0, 0, nil, true, now
    l.began, l.from = l.began + s.cool - math.max(now, l.from), s.cool
  end
  if cuts or is_paused then learn.calm(name) else measure_again(name) end
  return is_paused and 'paused' or 'alone'
end

-- Forgets what nobody needs: no refusal for long, and nobody held up. Returns whether something is still known.
function learn.is_known(name)
  load({ name })
  local l = states[name].l
  if not l or now - math.max(l.need, tonumber(states[name].cool) or 0) <= FORGET then return l ~= nil end
  if configured[name].learned then
    redis.call('HDEL', settings_key, name)
    change_version()
    configured[name], texts[name] = {}, ''
  end
  states[name].l = nil
  measure_again(name)
  return false
end
