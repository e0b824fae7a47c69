"""The admission script on a real Redis, with a clock that tests set."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import orjson
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from redis import Redis
from support.servers.redis_servers import RedisServer

from stepfleet.orchestrator.store import keys, lua
from stepfleet.orchestrator.store.keys import NO_PREFIX

NOW = "local clock = redis.call('TIME')"
SET_CLOCK = "local clock = redis.call('HMGET', 'test:clock', 's', 'us')"
LEASE = 30_000


def request(run: str, *names: str, step: int = 0, op: str = "ask", **given: Any) -> dict[str, Any]:
    """Return the operation by which a step asks for its leave."""
    amounts: dict[str, Any] = {"r": 1, "i": 0, "o": 0, "s": 0}
    amounts |= {kind: given[kind] for kind in (*"iounkam", "own") if kind in given}
    return {
        "op": op,
        "run": run,
        "step": step,
        "agent": given.get("agent", "a"),
        "tenant": given.get("tenant", ""),
        "names": names,
        "class": 2 * given.get("priority", 1) + given.get("fresh", False),
        "amounts": amounts,
        **{name: given[name] for name in ("crashes", "lost") if name in given},
    }


@dataclass
class Admissions:
    """Calls the script as workers do, and recounts what it has granted."""

    client: Redis
    now: int = 1_800_000_000_000
    granted: dict[str, tuple[int, list[str], int]] = field(default_factory=dict)
    """By run: the step that may call, its limits, and when it was last granted."""
    ended: set[str] = field(default_factory=set)
    """Runs that were dispatched without a grant: a budget of theirs is spent."""
    served: Counter[str] = field(default_factory=Counter)
    pause: int = -1
    waiting: int = 0
    mine: int = 0
    missing: list[str] = field(default_factory=list)
    """Names that need what the ledger has of them."""

    def __post_init__(self) -> None:
        text = lua.text("admit")
        assert NOW in text
        self.script = self.client.register_script(text.replace(NOW, SET_CLOCK))

    def limit(self, name: str, **fields: float | str) -> None:
        """Set a limit as the command line does."""
        self.client.hset(NO_PREFIX.of(keys.LIMIT_SETTINGS), name, orjson.dumps(fields).decode())

    def call(self, *operations: dict[str, Any], caller: str = "w1") -> list[str]:
        """Return the words of the reply, and note who was admitted."""
        seconds, ms = divmod(self.now, 1000)
        self.client.hset("test:clock", mapping={"s": seconds, "us": ms * 1000})
        shown = orjson.dumps(operations).decode()
        state = NO_PREFIX.of(keys.LIMIT_STATE)
        words, flat, self.pause, self.waiting, _, self.mine, missing = self.script(
            [state], [caller, LEASE, shown]
        )
        self.missing = list(missing)
        for run, step, _agent in zip(*[iter(flat)] * 3, strict=True):
            self.note(run, int(step))
        return list(words)

    def note(self, run: str, step: int) -> None:
        text = self.client.hget(NO_PREFIX.of(keys.LIMIT_GRANTS), run)
        if text is None:
            self.ended.add(run)
            return
        stored = orjson.loads(str(text))
        self.granted[run] = (step, stored["names"], self.now)
        self.served[stored["tenant"]] += 1

    def ask(self, run: str, *names: str, step: int = 0, op: str = "ask", **given: Any) -> str:
        """Ask for a step's leave; return the word."""
        word = self.call(request(run, *names, step=step, op=op, **given))[0]
        if op == "try" and word == "granted":
            self.note(run, step)
        return word

    def settle(self, run: str, step: int = 0, **amounts: int) -> str:
        """End a grant; without amounts as it was reserved."""
        operation: dict[str, Any] = {"op": "settle", "run": run, "step": step}
        if self.granted.get(run, (None,))[0] == step:
            del self.granted[run]
        return self.call(operation | ({"amounts": amounts} if amounts else {}))[0]

    def spend(self, run: str, step: int = 0, *names: str, **spent: int) -> str:
        """End a grant with what its call has spent of budgets."""
        if self.granted.get(run, (None,))[0] == step:
            del self.granted[run]
        operation = {"op": "settle", "run": run, "step": step, "amounts": {"r": 1}}
        return self.call(operation | {"spent": spent, "names": names})[0]

    def numbers(self, key: str, name: str) -> tuple[int, ...]:
        """Return what the script has of a budget: spent (in all, or of a day), or reserved."""
        text = str(self.client.hget(NO_PREFIX.of(key), name) or "0 0 0 0")
        return tuple(int(one) for one in text.split()[:4])

    def refund(self, run: str, step: int = 0) -> str:
        """End a grant as if nothing had been sent."""
        self.granted.pop(run, None)
        return self.call({"op": "refund", "run": run, "step": step})[0]

    def tick(self, later: int = 0, caller: str = "w1") -> bool:
        """Call as the ticker does, `later` ms from now; return whether it has the turn."""
        self.now += later
        self.call({"op": "tick"}, caller=caller)
        return bool(self.mine)

    def refuse(self, name: str, times: int = 1, **given: Any) -> str:
        """Have a provider refuse calls; return whether the fleet waits: three agree."""
        word = ""
        for _ in range(times):
            word = self.call({"op": "throttled", "names": [name], "age": 10, **given})[0]
        return word

    def in_flight(self, name: str) -> int:
        """Return the script's own count."""
        state = self.client.hget(NO_PREFIX.of(keys.LIMIT_STATE), name)
        return int(orjson.loads(state).get("f", 0)) if state else 0


def search(
    server: RedisServer,
    play: Callable[[Admissions, list[Any]], None],
    operations: st.SearchStrategy[list[Any]],
    examples: int,
    change: Callable[[str], str] | None = None,
) -> None:
    """Play generated operations on the script, or on a changed copy of it."""
    with Redis.from_url(server.url, decode_responses=True) as client:
        real = Admissions(client)
        if change:
            real.script = client.register_script(change(str(real.script.script)))

        @settings(
            max_examples=examples,
            database=None,
            derandomize=True,
            report_multiple_bugs=False,
            phases=[Phase.generate] if change else list(Phase),
            suppress_health_check=list(HealthCheck),
        )
        @given(operations)
        def example(found: list[Any]) -> None:
            play(real, found)

        example()


def seeded(old: str, new: str) -> Callable[[str], str]:
    """Return what puts a bug into the script; it has to fit."""
    assert old in lua.text("admit"), "the script has changed: so does the seeded bug"
    return lambda text: text.replace(old, new, 1)
