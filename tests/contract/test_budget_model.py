"""Budgets against a model of them, written from the design: never exceeded but by estimates.

The model adds up what was granted, spent, refunded and lost, and knows nothing of Redis. After each
call its sums are the script's, each grant has had room, nobody waits while there is room for all,
and whoever is beyond a budget that stops runs is sent to its end.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
from hypothesis import strategies as st
from support.runs.admissions import LEASE, Admissions, search, seeded
from support.servers.redis_servers import RedisServer

from stepfleet.orchestrator.store import keys
from stepfleet.orchestrator.store.keys import NO_PREFIX

DAY = 86_400_000
LIMITS: dict[str, dict[str, Any]] = {
    "openai:m": {"in_flight": 50},
    "tenant:stop": {"usd": 100e-9},
    "tenant:hold": {"usd": 100e-9, "on_budget": "hold"},
    "tenant:daily": {"usd_per_day": 60e-9, "usd": 150e-9, "on_budget": "hold"},
    "batch:*": {"usd": 130e-9, "on_budget": "hold"},
}
KNOWN = {"tenant:hold": 30, "batch:x": 20}
"""What the ledger has of names before they have budgets."""


class Call(NamedTuple):
    """A call that has been granted, or waits: its limits and its estimate."""

    names: tuple[str, ...]
    wanted: int


@dataclass
class Model:
    """What the design says, in billionths of a USD."""

    now: int
    budgets: dict[str, tuple[int, int, bool]] = field(default_factory=dict)
    spent: dict[str, int] = field(default_factory=dict)
    days: dict[tuple[str, int], int] = field(default_factory=dict)
    lacked: dict[str, int] = field(default_factory=dict)
    held: dict[str, Call] = field(default_factory=dict)
    waits: dict[str, Call] = field(default_factory=dict)

    def budget(self, name: str) -> tuple[float, float, bool]:
        fields = LIMITS.get(name) or LIMITS[name.split(":", maxsplit=1)[0] + ":*"]
        whole, daily = (fields.get(kind, 1.0) * 1e9 for kind in ("usd", "usd_per_day"))
        raised = self.budgets.get(name, (0, 0, False))[0]
        return whole + raised, daily + raised, fields.get("on_budget") == "hold"

    def reserved(self, name: str) -> int:
        return sum(one.wanted for one in self.held.values() if name in one.names)

    def pay(self, call: Call, paid: int) -> None:
        for name in call.names:
            self.spent[name] = self.spent.get(name, KNOWN.get(name, 0)) + paid
            today = (name, self.now // DAY)
            self.days[today] = self.days.get(today, 0) + paid
            self.lacked[name] = self.lacked.get(name, 0) + max(paid - call.wanted, 0)

    def short(self, call: Call, *, alone: bool) -> list[str]:
        """Return the limits without room; `alone`: whatever others have reserved."""
        found = []
        for name in call.names:
            whole, daily, _ = self.budget(name)
            others = 0 if alone else self.reserved(name)
            spent = self.spent.get(name, KNOWN.get(name, 0))
            today = self.days.get((name, self.now // DAY), 0)
            for sums, most in ((spent, whole), (today, daily)):
                if sums >= most - 0.5 or sums + others + call.wanted > most + 0.5:
                    found.append(name)
        return found

    def is_over(self, call: Call) -> bool:
        return any(not self.budget(name)[2] for name in self.short(call, alone=True))


@dataclass
class Pair:
    """The script and the model, side by side."""

    real: Admissions
    model: Model

    def ask(self, run: str, who: tuple[str, str], wanted: int) -> None:
        if run in self.model.held or run in self.model.waits:
            return
        tenant, batch = who
        names = ("openai:m", f"tenant:{tenant}", *([f"batch:{batch}"] if batch else []))
        self.model.waits[run] = Call(names[1:], wanted)
        self.real.granted.clear()
        self.real.ended.clear()
        self.real.ask(run, *names, tenant=tenant, u=wanted)
        self.follow()

    def end(self, run: str, paid: int | None) -> None:
        """Settle with what was paid, or refund."""
        if run not in self.model.held:
            return
        call = self.model.held.pop(run)
        self.real.granted.clear()
        if paid is None:
            assert self.real.refund(run) == "done"
        else:
            self.model.pay(call, paid)
            assert self.real.spend(run, 0, u=paid) == "done"
        self.follow()

    def lose(self, run: str) -> None:
        """Its worker is lost: the next one charges it, twice over, and tries again."""
        if run not in self.model.held:
            return
        call = self.model.held.pop(run)
        self.model.pay(call, call.wanted)
        self.real.granted.clear()
        for word in ("done", "none"):
            lost = {"op": "lost", "run": run, "step": 0, "crashes": 1}
            assert self.real.call(lost) == [word]
        self.follow()

    def tick(self, ms: int) -> None:
        self.real.granted.clear()
        renewals = [{"op": "renew", "run": run, "step": 0} for run in self.model.held]
        self.real.now += ms
        self.model.now = self.real.now
        self.real.call(*renewals, {"op": "tick"})
        self.follow()

    def follow(self) -> None:
        """Bring what is missing, apply who was granted or ended, and check what has to hold."""
        model, real = self.model, self.real
        while real.missing:
            name = real.missing[0]
            known = {"u": model.spent.get(name, KNOWN.get(name, 0))}
            today = real.now // DAY
            real.call({"op": "base", "names": [name], "all": known, "day": {}, "today": today})
        for run in list(real.granted):
            if run in model.held:
                continue
            call = model.waits.pop(run)
            assert not model.short(call, alone=False), f"{run} was granted without room"
            model.held[run] = call
        for run in real.ended & model.waits.keys():
            assert model.is_over(model.waits.pop(run)), f"{run} was sent to its end"
        real.ended.clear()
        for name in map(str, real.client.hkeys(NO_PREFIX.of(keys.LIMIT_SPENT))):
            spent = model.spent.get(name, KNOWN.get(name, 0))
            assert real.numbers(keys.LIMIT_SPENT, name)[0] == spent
            assert real.numbers(keys.LIMIT_RESERVED, name)[0] == model.reserved(name)
            most = max(model.budget(name)[0], KNOWN.get(name, 0)) + model.lacked.get(name, 0)
            assert spent + model.reserved(name) <= most + 0.5
        for run, call in model.waits.items():
            assert not model.is_over(call), f"{run} waits, and its budget is spent"
        idle = [run for run, one in model.waits.items() if not model.short(one, alone=False)]
        blocked = {one.names for one in model.waits.values() if model.short(one, alone=False)}
        # Those of equal limits wait for the first of them, however small they are.
        assert all(model.waits[run].names in blocked for run in idle), f"{idle} wait"


WHO = st.tuples(st.sampled_from(["stop", "stop", "hold", "daily"]), st.sampled_from(["", "x"]))
RUN = st.integers(0, 5).map("r{}".format)
OPERATIONS = st.one_of(
    st.tuples(st.just("ask"), RUN, WHO, st.sampled_from([1, 10, 35, 50])),
    st.tuples(st.just("end"), RUN, st.sampled_from([None, 0, 5, 35, 90])),
    st.tuples(st.just("lose"), RUN),
    st.tuples(st.just("tick"), st.sampled_from([1, 2000, LEASE - 1000, DAY])),
    st.tuples(st.just("raise"), st.sampled_from(["tenant:hold", "tenant:daily", "tenant:stop"])),
)


def play(real: Admissions, operations: list[Any]) -> None:
    real.client.flushdb()
    real.missing = []
    for name, fields in LIMITS.items():
        real.limit(name, **fields)
    pair = Pair(real, Model(real.now))
    for operation in operations:
        match operation:
            case ("ask", run, who, wanted):
                pair.ask(run, who, wanted)
            case ("end", run, paid):
                pair.end(run, paid)
            case ("lose", run):
                pair.lose(run)
            case ("tick", ms):
                pair.tick(ms)
            case (_, name):
                more = pair.model.budgets.get(name, (0, 0, False))[0] + 50
                pair.model.budgets[name] = (more, 0, False)
                given = {kind: one for kind, one in LIMITS[name].items() if kind != "on_budget"}
                raised = {kind: one + more * 1e-9 for kind, one in given.items()}
                real.limit(name, **LIMITS[name] | raised)
                real.client.hincrby(NO_PREFIX.of(keys.LIMIT_SETTINGS), "version", 1)
                pair.tick(1)


MANY = st.lists(OPERATIONS, min_size=20, max_size=50)


@pytest.mark.parametrize("examples", [40, pytest.param(400, marks=pytest.mark.long)])
def test_budgets_are_never_exceeded_but_by_estimates(
    redis_server: RedisServer, examples: int
) -> None:
    search(redis_server, play, MANY, examples)


BUGS = {
    "what calls hold is not counted": ("held > 0 and spent + held +", "false and spent + held +"),
    "a settlement leaves its reservation": ("budget.reserve(name, grant.amounts, -1)", ""),
    "the estimate is spent, not the price": (
        "budget.spend(name, spent or used)",
        "budget.spend(name, used)",
    ),
    "a refund is spent": (
        "ends.end_grant(op, {})",
        "ends.end_grant(op, grants[op.run].amounts)",
    ),
    "a lost call is free": (
        "return drop(op.run, op.step)\nend",
        "return drop(op.run, op.step, {})\nend",
    ),
    "only the first limit is looked at": (
        "for _, name in ipairs(names) do\n    local room",
        "for _, name in ipairs({ names[2] }) do\n    local room",
    ),
    "a day never ends": ("local today = math.floor(now / DAY_MS)", "local today = 20000"),
    "a held budget stops runs": ("if b and not b.hold and", "if b and"),
    "a spent budget lets runs wait": ("e.over = budget.over(e.names, e.amounts)", ""),
    "the ledger is forgotten": (
        "b.spent.all[kind] = math.max(",
        "b.spent.all[kind] = math.min(0, ",
    ),
    "others are in the way of an end": ("return waits, true", "return waits, false"),
}


# Its search takes as long as those of all the others together.
SLOW = {"a day never ends"}


@pytest.mark.parametrize(
    "bug", [pytest.param(bug, marks=pytest.mark.long if bug in SLOW else ()) for bug in BUGS]
)
def test_the_budget_model_finds_seeded_bugs(bug: str, redis_server: RedisServer) -> None:
    change = seeded(*BUGS[bug])
    with pytest.raises(Exception):  # noqa: B017 - any failure finds it
        search(redis_server, play, MANY, 3000, change)
