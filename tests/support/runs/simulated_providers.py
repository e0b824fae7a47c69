"""Models of providers, and a fleet before one of them, over virtual time.

The fleet is the admission script on a real Redis, asked as workers ask it; its clock is set, and
so minutes of a fleet take seconds. A provider decides about each call when it is sent.
"""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson
from redis import Redis
from support.runs.admissions import LEASE, Admissions, request

from stepfleet.orchestrator.store import keys
from stepfleet.orchestrator.store.keys import NO_PREFIX

MODEL = "openai:m"
TICK = 50
"""Milliseconds of one turn of all workers."""
MOST_TOGETHER = 100
"""Operations of one call of the script."""


class Provider(Protocol):
    """Decides about calls; `at` is in seconds."""

    def accepts(self, at: float) -> bool:
        """Return whether a call that is sent now is accepted."""


@dataclass
class Bucket:
    """Allows `per_second(at)` calls, in bursts of so many seconds."""

    per_second: Callable[[float], float]
    burst: float = 2.0
    level: float = 0.0
    seen: float = 0.0

    def accepts(self, at: float) -> bool:
        rate = self.per_second(at)
        self.level = min(self.level + (at - self.seen) * rate, max(rate * self.burst, 1.0))
        self.seen = at
        if self.level < 1:
            return False
        self.level -= 1
        return True


@dataclass
class Minutes:
    """Allows so many calls in each minute of the clock, however fast they come."""

    most: int
    minute: int = -1
    taken: int = 0

    def accepts(self, at: float) -> bool:
        if int(at // 60) != self.minute:
            self.minute, self.taken = int(at // 60), 0
        self.taken += 1
        return self.taken <= self.most


@dataclass
class Sporadic:
    """Refuses this share of the calls, at random."""

    share: float
    dice: random.Random = field(default_factory=lambda: random.Random(7))

    def accepts(self, at: float) -> bool:
        return self.dice.random() >= self.share


@dataclass
class Bursts:
    """Refuses a share of the calls in the first seconds of every so many."""

    every: float
    seconds: float
    share: float = 1.0
    dice: random.Random = field(default_factory=lambda: random.Random(7))

    def accepts(self, at: float) -> bool:
        return at % self.every >= self.seconds or self.dice.random() >= self.share


@dataclass
class AnyOf:
    """Several keys: each call is made with one of them, at random."""

    keys: list[Provider]
    dice: random.Random = field(default_factory=lambda: random.Random(7))

    def accepts(self, at: float) -> bool:
        return self.dice.choice(self.keys).accepts(at)


@dataclass
class AllOf:
    """Accepts what all of these accept."""

    parts: list[Provider]

    def accepts(self, at: float) -> bool:
        answers = [one.accepts(at) for one in self.parts]  # each counts the call
        return all(answers)


@dataclass
class Second:
    """What the provider saw in a second."""

    accepted: int = 0
    refused: int = 0


class Fleet:
    """So many runs that call one after another, each `latency` seconds long.

    A refused call comes after `refusal` seconds, and asks for `wish` more (None: for nothing).
    `begun`: how many of them call; the others wait until they are let in.
    """

    def __init__(
        self,
        client: "Redis",
        provider: Provider,
        *,
        calls_per_second: float,
        latency: float = 1.0,
        refusal: float = 0.1,
        wish: float | None = 1.0,
        **limit: float,
    ) -> None:
        self.gate = Admissions(client)
        self.start = self.gate.now
        self.provider = provider
        self.latency, self.refusal, self.wish = latency, refusal, wish
        self.seconds: dict[int, Second] = {}
        self.steps: dict[str, int] = {}
        self.events: list[tuple[float, int, str, str]] = []
        self.numbers = 0
        self.sent = 0
        self.known = bool(limit)
        self.refusals: dict[str, int] = {}
        self.left: set[str] = set()
        """Runs of a batch that wait for the answer to their only call."""
        if limit:
            self.gate.limit(MODEL, **limit)
        for number in range(round(calls_per_second * latency)):
            run = f"r{number}"
            self.steps[run] = 0
            self.at(2.0 * number / (calls_per_second * latency), "ask", run)

    @property
    def now(self) -> float:
        """Seconds since the beginning."""
        return (self.gate.now - self.start) / 1000

    def at(self, seconds: float, what: str, run: str) -> None:
        self.numbers += 1
        heapq.heappush(self.events, (seconds, self.numbers, what, run))

    def play(self, seconds: float) -> tuple[float, float]:
        """Let so much time pass; return accepted calls per second, and the share of refused."""
        before = self.now
        while self.now < before + seconds - 1e-9:
            self.turn()
        found = [one for at, one in self.seconds.items() if before <= at < self.now]
        accepted = sum(one.accepted for one in found)
        refused = sum(one.refused for one in found)
        return accepted / seconds, refused / max(accepted + refused, 1)

    def batch(self, runs: int, most: float = 120.0) -> float:
        """Begin so many runs of one call each; return the seconds until all have answers."""
        before = self.now
        for number in range(runs):
            run = f"{round(before * 1000)}-{number}"
            self.steps[run] = 0
            self.left.add(run)
            self.at(before + number / runs, "ask", run)
        while self.left and self.now < before + most:
            self.turn()
        return self.now - before

    def turn(self) -> None:
        """All workers do what is due."""
        self.gate.now += TICK
        due = []
        while self.events and self.events[0][0] <= self.now:
            due.append(heapq.heappop(self.events)[2:])
        refused = [run for what, run in due if what == "refused"]
        words = dict(zip(refused, self.call([self.throttled() for _ in refused]), strict=True))
        operations: list[dict[str, Any]] = []
        for what, run in due:
            if what == "ask":
                operations += self.asking(run)
                continue
            operations += self.settling(run)
            if what == "refused" and words[run] == "alone":
                self.refusals[run] = self.refusals.get(run, 0) + 1
                own = 0.75 * 3 ** min(self.refusals[run] - 1, 4)
                self.at(self.now + max(own, self.wish or 0.0), "ask", run)
                continue
            if what == "answered":
                self.refusals.pop(run, None)
                if run in self.left:
                    self.left.discard(run)
                    continue
            operations += self.asking(run, "ask" if what == "answered" else "again")
        self.call([*operations, {"op": "tick"}])
        while self.gate.pause == 0:
            self.call([{"op": "tick"}])

    def throttled(self) -> dict[str, Any]:
        op: dict[str, Any] = {"op": "throttled", "names": [MODEL], "age": self.refusal * 1000}
        if self.wish is not None:
            op["ms"] = round(self.wish * 1000)
        if not self.known:
            op |= {"sent": self.sent, "secs": max(self.now, 1)}
            self.known = True
        return op

    def settling(self, run: str) -> list[dict[str, Any]]:
        step, self.steps[run] = self.steps[run], self.steps[run] + 1
        return [{"op": "settle", "run": run, "step": step, "amounts": {"r": 1}}]

    def asking(self, run: str, op: str = "ask") -> list[dict[str, Any]]:
        if not self.known:
            self.sent += 1
            self.send(run)
            return []
        return [request(run, MODEL, step=self.steps[run], op=op)]

    def send(self, run: str) -> None:
        second = self.seconds.setdefault(int(self.now), Second())
        if self.provider.accepts(self.now):
            second.accepted += 1
            self.at(self.now + self.latency, "answered", run)
        else:
            second.refused += 1
            self.at(self.now + self.refusal, "refused", run)

    def call(self, operations: list[dict[str, Any]]) -> list[str]:
        words: list[str] = []
        gate = self.gate
        for at in range(0, len(operations), MOST_TOGETHER):
            seconds, ms = divmod(gate.now, 1000)
            gate.client.hset("test:clock", mapping={"s": seconds, "us": ms * 1000})
            shown = orjson.dumps(operations[at : at + MOST_TOGETHER]).decode()
            reply = gate.script([NO_PREFIX.of(keys.LIMIT_STATE)], ["w1", LEASE, shown])
            words += reply[0]
            gate.pause = reply[2]
            for run, _, _ in zip(*[iter(reply[1])] * 3, strict=True):
                self.send(run)
        return words

    def learned(self) -> dict[str, Any]:
        """Return what the script has learned."""
        text = self.gate.client.hget(NO_PREFIX.of(keys.LIMIT_STATE), MODEL) or "{}"
        return dict(orjson.loads(str(text)).get("l") or {})
