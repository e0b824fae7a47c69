"""What is learned of providers' limits, against a model of it, written from the design.

The model counts by itself what is left of each rate. Of a learned rate it takes the number, and
knows its bounds: who may lower it, when it has to grow, when it stays, and what ends it. After each
call nobody has called in a pause or without room, and nobody waits while there is room for all.
"""

from dataclasses import dataclass, field
from typing import Any

import orjson
import pytest
from hypothesis import strategies as st
from redis import Redis
from support.runs.admissions import Admissions, search, seeded
from support.runs.simulated_providers import Fleet, Sporadic
from support.servers.redis_servers import RedisServer

from stepfleet.orchestrator.store import keys
from stepfleet.orchestrator.store.keys import NO_PREFIX

M, T, U = "openai:m", "openai:t", "openai:u"
NAMES = (M, T, U)
LIMITS: dict[str, dict[str, float]] = {
    M: {"requests_per_minute": 600},
    T: {"tokens_per_minute": 60_000, "burst": 2},
}
"""What people have set at first; nothing is known of the third model."""
FIELDS = {"r": "requests_per_minute", "t": "tokens_per_minute"}
LEAST, FEW, FASTEST = 1.0, 4, 1.26
"""Requests per minute; refusals that are no reason to cut a rate; most growth at once."""
AGREE = 3
"""Refusals without which no fleet pauses."""
TOLERATED = 0.07
LONGEST_FIRST = 30_000
MINUTE, HOUR = 60_000, 3_600_000
EDGE = 0.01
MOST_CALLS, MOST_ROUNDS = 100, 400
SETTINGS, STATE = NO_PREFIX.of(keys.LIMIT_SETTINGS), NO_PREFIX.of(keys.LIMIT_STATE)


@dataclass
class Limit:
    """One model's limit, by the design. `config` is None where there is none."""

    name: str
    at: int
    config: dict[str, float] | None
    said: dict[str, float] = field(default_factory=dict)
    rate: float | None = None
    """What refusals have left of its requests per minute."""
    levels: dict[str, float] = field(default_factory=dict)
    cool: int = 0
    refusals: int = 0
    """Since its rate was last cut."""
    since_pause: int = 0
    tolerated: float = TOLERATED
    held: dict[str, int] = field(default_factory=dict)
    waits: dict[str, int] = field(default_factory=dict)

    @property
    def is_set(self) -> bool:
        """Whether people have set it."""
        return bool(self.config)

    @property
    def ceiling(self) -> float:
        """What nobody may exceed."""
        return min((self.config or {}).get(FIELDS["r"], 1e9), self.said.get("r", 1e9))

    def rates(self) -> dict[str, float]:
        """Return what holds, per minute."""
        found = {kind: (self.config or {}).get(name, 1e9) for kind, name in FIELDS.items()}
        for kind, rate in self.said.items():
            found[kind] = min(found[kind], rate)
        found["r"] = min(found["r"], self.rate or 1e9)
        return {kind: rate for kind, rate in found.items() if rate < 1e9}

    def most(self, rate: float) -> float:
        return max(rate / 60 * (self.config or {}).get("burst", 1), 1.0)

    def fill(self, now: int) -> None:
        """Let time fill what is left; a pause fills nothing."""
        gone, self.at = max(now - max(self.at, self.cool), 0), now
        for kind, rate in self.rates().items():
            most = self.most(rate)
            self.levels[kind] = min(most, self.levels.get(kind, most) + gone * rate / MINUTE)
        for kind in self.levels.keys() - self.rates().keys():
            del self.levels[kind]

    def take(self, requests: int, tokens: int) -> None:
        for kind, number in (("r", requests), ("t", tokens)):
            if kind in self.levels:
                most = self.most(self.rates()[kind])
                self.levels[kind] = min(most, self.levels[kind] - number)

    def has_room(self, tokens: int, edge: float) -> bool:
        """Return whether a call may be made; `edge` is for the model's arithmetic."""
        wanted = {"r": 1.0, "t": float(tokens)}
        return self.cool <= self.at and all(
            not wanted[kind] or level >= min(wanted[kind], self.most(self.rates()[kind])) + edge
            for kind, level in self.levels.items()
        )


class Pair:
    """The script and the model, side by side."""

    def __init__(self, real: Admissions) -> None:
        self.real = real
        self.limits = {name: Limit(name, real.now, LIMITS.get(name)) for name in NAMES}
        for name, fields in LIMITS.items():
            real.limit(name, **fields)
        self.change("version")

    def change(self, name: str, text: str = "") -> None:
        """Write into the settings as the command line does."""
        if text:
            self.real.client.hset(SETTINGS, name, text)
        elif name != "version":
            self.real.client.hdel(SETTINGS, name)
        self.real.client.hincrby(SETTINGS, "version", 1)

    def call(self, *operations: dict[str, Any]) -> list[str]:
        for limit in self.limits.values():
            limit.fill(self.real.now)
        self.real.granted.clear()
        return self.real.call(*operations)

    # ------------------------------------------------------------------ what happens

    def ask(self, run: str, tokens: int, op: str = "ask") -> None:
        limit = self.limits[NAMES[int(run[1:]) % 3]]
        if limit.config is None or run in limit.held or run in limit.waits:
            return
        limit.waits[run] = tokens
        for one in self.limits.values():
            one.fill(self.real.now)
        self.real.granted.clear()
        self.real.ask(run, limit.name, i=tokens, op=op)
        self.follow()

    def end(self, run: str, tokens: int | None) -> None:
        """Settle with so many tokens, or give all back."""
        limit = self.limits[NAMES[int(run[1:]) % 3]]
        if run not in limit.held:
            return
        op: dict[str, Any] = {"op": "refund", "run": run, "step": 0}
        if tokens is not None:
            op |= {"op": "settle", "amounts": {"r": 1, "i": tokens}}
        self.call(op)
        self.give_back(limit, run, tokens)
        self.follow()

    def give_back(self, limit: Limit, run: str, tokens: int | None) -> None:
        reserved = limit.held.pop(run)
        limit.take(-1 if tokens is None else 0, (tokens or 0) - reserved)

    def refuse(self, run: str, ms: int | None, age: int, *, late: bool) -> None:
        """A call is refused, settled and waits again; `late`: its settlement comes first."""
        limit = self.limits[NAMES[int(run[1:]) % 3]]
        if run not in limit.held and limit.config is not None:
            return
        tokens = limit.held.get(run, 0)
        if late and run in limit.held:
            self.end(run, 0)
        self.throttle(limit, ms, age)
        self.end(run, 0)
        self.ask(run, tokens, "again")

    def throttle(self, limit: Limit, ms: int | None, age: int) -> None:
        """Apply a refusal to both."""
        now, before, is_new = self.real.now, limit.rate, limit.config is None
        op: dict[str, Any] = {"op": "throttled", "names": [limit.name], "age": age}
        op |= {} if ms is None else {"ms": ms}
        op |= {"sent": 20, "secs": 10} if is_new else {}
        limit.refusals, limit.since_pause = limit.refusals + 1, limit.since_pause + 1
        word = self.call(op)[0]
        if is_new:
            limit.config = {}
            assert self.settings(limit.name) == {"learned": 1}, "nobody comes to know of it"
        state = self.state(limit.name)
        cool = state.get("cool", 0)
        if word == "alone":
            assert limit.cool <= now, "a refusal ends no pause"
        elif limit.cool > now:
            assert cool == max(limit.cool, now + (ms or 0))
        else:
            assert limit.since_pause >= AGREE, "one refusal stops nobody but its call"
            assert now + max(ms or 0, 500) <= cool <= now + max(ms or 0, LONGEST_FIRST)
            limit.since_pause = 0
        limit.cool = max(limit.cool, cool)
        learned = state["l"].get("r")
        if before is None and limit.refusals <= FEW:
            assert learned is None, "few refusals change nothing"
        self.cut(limit, state, is_calm=word == "paused")
        self.follow()

    def cut(self, limit: Limit, state: dict[str, Any], *, is_calm: bool = False) -> None:
        """Take over a rate that refusals have changed; behind a cut calls go out one by one."""
        learned = state["l"]
        is_cut = (learned.get("last") or {}).get("at") == self.real.now
        is_restored = learned["t"] > max(limit.tolerated, TOLERATED)
        if is_cut or is_restored:
            assert limit.refusals > FEW, "few refusals are no reason"
            limit.refusals = 0
        limit.rate, limit.tolerated = learned.get("r"), learned["t"]
        for kind, rate in limit.rates().items():
            limit.levels.setdefault(kind, limit.most(rate))
        limit.fill(self.real.now)
        if is_cut or is_restored or is_calm:
            limit.levels = {
                kind: min(level, 1 if kind == "r" else 0) for kind, level in limit.levels.items()
            }

    def state_limits(self, name: str, said: dict[str, float], left: float | None) -> None:
        """An answer's headers state limits, and what is left."""
        limit = self.limits[name]
        if limit.config is None:
            return
        op: dict[str, Any] = {"op": "headers", "names": [name], "said": said}
        self.call(op if left is None else op | {"left": {"r": left}})
        lower = {
            kind: rate
            for kind, rate in said.items()
            if not limit.is_set or rate < (limit.config or {}).get(FIELDS[kind], 0)
        }
        if lower.get("r") != limit.said.get("r"):
            limit.rate = None
        limit.said = lower
        limit.fill(self.real.now)
        if left is not None and limit.levels.get("r", 0) - left >= 1:
            limit.levels["r"] = left
        self.follow()

    def set_limit(self, name: str, rate: float | None) -> None:
        """People set requests per minute, or clear the limit."""
        limit = self.limits[name]
        if limit.config is None and rate is None:
            return
        self.call({"op": "charge", "names": [name], "amounts": {}})  # what is left by now
        fields = None if rate is None else {**LIMITS.get(name, {}), FIELDS["r"]: rate}
        limit.config, limit.said, limit.rate, limit.refusals = fields, {}, None, 0
        limit.since_pause, limit.tolerated = 0, TOLERATED
        limit.cool = limit.cool if fields else 0  # to clear it ends its pause
        self.change(name, orjson.dumps(fields).decode() if fields else "")
        self.call({"op": "tick"})
        limit.fill(self.real.now)
        self.follow()

    def tick(self, ms: int) -> None:
        held = [run for limit in self.limits.values() for run in limit.held]
        self.real.now += ms
        self.call(*({"op": "renew", "run": run, "step": 0} for run in held), {"op": "tick"})
        for limit in self.limits.values():
            if ms > HOUR and limit.cool + HOUR < self.real.now:
                self.forget(limit)
        self.follow()

    def forget(self, limit: Limit) -> None:
        """Nobody was refused for an hour, nor held up but by a call."""
        if self.state(limit.name).get("l") is None:
            limit.rate, limit.said, limit.refusals, limit.since_pause = None, {}, 0, 0
            limit.tolerated = TOLERATED
            if limit.config == {}:
                assert self.settings(limit.name) is None
                limit.config = None
            limit.fill(self.real.now)
        else:
            assert limit.waits or limit.name in self.busy, "what nobody needs is forgotten"

    # ------------------------------------------------------------------ what has to hold

    busy: frozenset[str] = frozenset()
    """Where somebody waited when time went on."""

    def follow(self) -> None:
        """Let the script come to its end, apply who was admitted, and check everything."""
        real, calls = self.real, 0
        while real.pause == 0:
            real.call()
            calls += 1
            assert calls < MOST_CALLS, "the script finds no end"
        for run, (_, names, _) in real.granted.items():
            limit = self.limits[names[0]]
            if run not in limit.held:
                tokens = limit.waits.pop(run)
                assert limit.cool <= real.now, f"{run} calls in a pause"
                assert limit.has_room(tokens, -EDGE), f"{run} was admitted without room"
                limit.held[run] = tokens
                limit.take(1, tokens)
        for limit in self.limits.values():
            self.check(limit)
        self.busy = frozenset(name for name, one in self.limits.items() if one.waits)

    def check(self, limit: Limit) -> None:
        state = self.state(limit.name)
        learned = state.get("l") or {}
        assert state.get("cool", 0) >= (limit.cool if limit.cool > self.real.now else 0)
        assert (learned.get("said") or {}) == limit.said
        rate, before = learned.get("r"), limit.rate
        is_cut = (learned.get("last") or {}).get("at") == self.real.now
        if is_cut or learned.get("t", 0) > max(limit.tolerated, TOLERATED):
            self.cut(limit, state)
        elif rate != before:
            assert before is not None, "it is learned from refusals alone"
            assert limit.waits or limit.name in self.busy, "nobody needs more"
            assert (rate or limit.ceiling) >= before, "it is lowered by refusals alone"
            assert rate or before * FASTEST >= limit.ceiling, "it is not where it began"
            limit.rate = rate
            limit.fill(self.real.now)
        limit.tolerated = learned.get("t", TOLERATED)
        assert rate is None or LEAST <= rate < limit.ceiling
        idle = bool(limit.waits) and all(limit.has_room(one, EDGE) for one in limit.waits.values())
        assert not idle, f"{limit.waits} wait, and there is room"

    def state(self, name: str) -> dict[str, Any]:
        found = orjson.loads(str(self.real.client.hget(STATE, name) or "{}"))
        learned = found.get("l") or {}
        if learned.get("said") == []:
            learned["said"] = {}  # Lua's empty table
        return dict(found)

    def settings(self, name: str) -> dict[str, Any] | None:
        text = self.real.client.hget(SETTINGS, name)
        return None if text is None else dict(orjson.loads(str(text)))

    def finish(self) -> None:
        """The provider lets everything pass: everybody has a turn, as rates grow again."""
        for _ in range(MOST_ROUNDS):
            for limit in self.limits.values():
                for run in list(limit.held):
                    self.end(run, 1)
            if not any(one.waits for one in self.limits.values()):
                break
            self.tick(6000)
        assert not any(one.waits for one in self.limits.values()), "somebody waits for ever"


RUN = st.integers(0, 11).map("r{}".format)
RATE = st.sampled_from([30.0, 240.0, 900.0, 6000.0])
OPERATIONS = st.one_of(
    st.tuples(st.just("ask"), RUN, st.sampled_from([0, 300, 2500])),
    st.tuples(st.just("end"), RUN, st.sampled_from([None, 0, 900])),
    st.tuples(
        st.just("refuse"),
        RUN,
        st.sampled_from([None, 0, 300, 2000, 20_000]),
        st.sampled_from([0, 400, 70_000]),
        st.booleans(),
    ),
    st.tuples(st.just("tick"), st.sampled_from([1, 100, 400, 2500, 20_000, MINUTE])),
    st.tuples(
        st.just("headers"),
        st.sampled_from(NAMES),
        st.fixed_dictionaries({"r": RATE}, optional={"t": st.just(30_000.0)}),
        st.sampled_from([None, 0, 2]),
    ),
    st.tuples(st.just("set"), st.sampled_from(NAMES), st.sampled_from([None, 120.0, 3000.0])),
    st.tuples(st.just("tick"), st.just(2 * HOUR)),
)
OFTEN = st.one_of(OPERATIONS, OPERATIONS.filter(lambda one: one[0] in ("ask", "refuse", "tick")))


def play(real: Admissions, operations: list[Any]) -> None:
    real.client.flushdb()
    pair = Pair(real)
    for operation in operations:
        match operation:
            case ("ask", run, tokens):
                pair.ask(run, tokens)
            case ("end", run, tokens):
                pair.end(run, tokens)
            case ("refuse", run, ms, age, late):
                pair.refuse(run, ms, age, late=late)
            case ("headers", name, said, left):
                pair.state_limits(name, said, left)
            case ("set", name, rate):
                pair.set_limit(name, rate)
            case (_, ms):
                pair.tick(ms)
    pair.finish()


MANY = st.lists(OFTEN, min_size=10, max_size=60)


def test_what_is_learned_keeps_its_bounds(redis_server: RedisServer) -> None:
    """LLM-15, ERR-22."""
    search(redis_server, play, MANY, 40)


@pytest.mark.long
def test_what_is_learned_keeps_its_bounds_at_length(redis_server: RedisServer) -> None:
    """The same for long."""
    search(redis_server, play, MANY, 3000)


BUGS = {
    "a pause is for nobody": ("if cool > now then return false, cool - now, 'c' end", ""),
    "a refusal shortens a pause": (
        "s.cool = math.max(cool, now + (ms or 0))",
        "s.cool = now + (ms or 0)",
    ),
    "a pause fills what is left": (
        "math.max(tonumber(s.at) or now, tonumber(s.cool) or 0)",
        "(tonumber(s.at) or now)",
    ),
    "behind a pause all go at once": (
        "s[kind] = math.min(s[kind], kind == 'r' and 1 or 0)",
        "s[kind] = s[kind]",
    ),
    "headers raise what is set": (
        "math.min(m.rates[kind] or rate / 60000, rate / 60000)",
        "rate / 60000",
    ),
    "the provider's count is not believed": ("s[kind] - left >= 1", "false"),
    "a rate falls without end": ("math.max(r * learn.KEPT, learn.LEAST)", "r * learn.KEPT / 50"),
    "a rate grows above what is set": (
        "if l.r >= learn.ceiling(name) then l.r, l.top = nil, nil end",
        "",
    ),
    "few refusals cost a rate": (
        "return learn.excess(l) > learn.SURE + ",
        "return learn.excess(l) > ",
    ),
    "one refusal stops the fleet": ("if x < learn.FEW or x <= n / 2 then return false end", ""),
    "a rate grows while nobody waits": ("if l.r and l.held and", "if l.r and"),
    "what was learned outlives what is set": (
        "if l and (l.of ~= redis.sha1hex(texts[name]) or not l.bn) then states[name].l = nil end",
        "",
    ),
    "what was learned is kept for ever": ("<= FORGET then", "<= 1000 * FORGET then"),
    "nobody comes to know of a new limit": ("redis.call('HSET', settings_key, name, MARK)", ""),
}


SOON: tuple[str, ...] = (
    "a pause is for nobody",
    "one refusal stops the fleet",
    "what was learned is kept for ever",
    "nobody comes to know of a new limit",
)
"""Those that few examples find; all are played at length."""


@pytest.mark.parametrize(
    "bug", [pytest.param(bug, marks=() if bug in SOON else pytest.mark.long) for bug in BUGS]
)
def test_the_learning_model_finds_seeded_bugs(bug: str, redis_server: RedisServer) -> None:
    change = seeded(*BUGS[bug])
    with pytest.raises(Exception):  # noqa: B017 - any failure finds it
        search(redis_server, play, MANY, 2000, change)


USELESS_CUTS = {
    "a cut that is of no use stays": ("if learn.is_vain(l, share) then", "if false then"),
    "a share that is known is not tolerated": (
        "l.t = math.min(1.5 * math.max(share, high.share), learn.MOST_TOLERATED)",
        "l.t = learn.TOLERATED",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("bug", USELESS_CUTS)
def test_a_provider_that_refuses_at_any_rate_finds_seeded_bugs(
    bug: str, redis_server: RedisServer
) -> None:
    """Random operations seldom make two cuts of one rate; a fleet over virtual time does."""
    change = seeded(*USELESS_CUTS[bug])
    with Redis.from_url(redis_server.url, decode_responses=True) as client:
        accepted = []
        for is_changed in (False, True):
            client.flushdb()
            fleet = Fleet(client, Sporadic(0.3), calls_per_second=50)
            if is_changed:
                fleet.gate.script = client.register_script(change(str(fleet.gate.script.script)))
            fleet.play(60)
            accepted.append(fleet.play(120)[0])
    right, wrong = accepted
    assert wrong < 0.8 * right
