"""What one event loop sees of the limits of models: calls without a grant, headers, prompts.

Decides what of it the fleet has to know; most answers change nothing, and cost no command.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from stepfleet.orchestrator.limits.estimates import AgentEstimates
from stepfleet.orchestrator.models.rate_headers import Standing
from stepfleet.orchestrator.protocol.claim import Work
from stepfleet.orchestrator.store.admission import Operation

AT_ONCE, PER_SECOND, PER_ANSWER = 32, 200.0, 4
"""Calls of all workers at the beginning; by time, linear and squared: a thousand after 1.8 s; and
by answers."""
SECONDS = 3.0
TICK = 0.02


class Ramp:
    """The ramp of one model in one of `workers`. `clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float], workers: int = 1) -> None:
        self._clock = clock
        self._share = 1 / max(workers, 1)
        self._began = clock()
        self._sent = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self.answers = 0

    @property
    def is_over(self) -> bool:
        """Whether everybody may call."""
        return not self._waiting and self._clock() - self._began > SECONDS

    def turn(self) -> "asyncio.Future[None] | None":
        """Return what to wait for before a call; None for nothing."""
        if not self._waiting and self._sent < self._allowed():
            self._sent += 1
            return None
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_later(TICK, self._release)
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.append(turn)
        return turn

    def end(self) -> None:
        """Let everybody go on: the model has refused a call, and they are to look."""
        self._began -= SECONDS
        self._release()

    def _allowed(self) -> float:
        gone = self._clock() - self._began
        if gone > SECONDS:
            return float("inf")
        by_time = (AT_ONCE + PER_SECOND * (gone + gone * gone)) * self._share
        return max(by_time, 1.0) + PER_ANSWER * self.answers

    def _release(self) -> None:
        while self._waiting and self._sent < self._allowed():
            turn = self._waiting.popleft()
            if not turn.done():  # its step may have been cancelled
                turn.set_result(None)
                self._sent += 1
        if self._waiting:
            asyncio.get_running_loop().call_later(TICK, self._release)


WINDOW = 10.0
FRESH = 1.0
"""Seconds; the rest of a rate in an answer that took longer is out of date."""
HOLD = 1.0
"""Seconds in which calls that began before their model had a limit are not sent any more."""
MINUTE = 60.0
MOST_MODELS = 1000


@dataclass(slots=True)
class Sent:
    """Calls of a model since `began` (monotonic seconds), and those of the window before."""

    began: float
    calls: int = 0
    before: int = 0
    ramp: Ramp | None = None


class Learning:
    """Counts and paces calls of models without a limit. `clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.workers = 1
        """How many there are in the fleet."""
        self._clock = clock
        self._sent: dict[str, Sent] = {}
        self._said: dict[str, dict[str, float]] = {}
        self._held: dict[str, float] = {}
        self._stated: dict[str, tuple[dict[str, float], float]] = {}
        """What the fleet was sent of a model's headers, and when."""

    @property
    def counts_tokens(self) -> bool:
        """Whether an answer has stated a limit of tokens."""
        return any(said.keys() - {"r"} for said in self._said.values())

    def turn(self, model: str) -> "asyncio.Future[None] | None":
        """Note a call that is made without a grant; return what it waits for, None for nothing."""
        now, sent = self._clock(), self._sent.get(model)
        if sent is None or now - sent.began >= 2 * WINDOW:
            if len(self._sent) >= MOST_MODELS:
                self._sent.clear()
            sent = self._sent[model] = Sent(now, ramp=Ramp(self._clock, self.workers))
        elif now - sent.began >= WINDOW:
            sent.before, sent.calls, sent.began = sent.calls, 0, now
        sent.calls += 1
        if sent.ramp is None or sent.ramp.is_over:
            sent.ramp = None
            return None
        return sent.ramp.turn()

    def holds(self, model: str) -> bool:
        """Return whether calls of a model without a limit are held back, since it refuses them."""
        return bool(self._held) and self._clock() < self._held.get(model, 0.0)

    def refused(
        self, model: str, stated: Mapping[str, float] | None = None, *, is_limited: bool
    ) -> dict[str, Any]:
        """Return what the fleet is to know of a model that has refused a call.

        `stated` are the limits that the refusal names. Calls are reported once: `sent` in `secs`
        seconds.
        """
        found: dict[str, Any] = {}
        if stated:
            self._say(model, {**self._said.get(model, {}), **stated})
        if not is_limited:
            if len(self._held) >= MOST_MODELS:
                self._held.clear()
            self._held[model] = self._clock() + HOLD
        if sent := self._sent.pop(model, None):
            if sent.ramp is not None:
                sent.ramp.end()
            calls, seconds = sent.calls, self._clock() - sent.began
            if sent.before:
                calls, seconds = calls + sent.before, seconds + WINDOW
            found = {"sent": calls, "secs": max(seconds, 1.0)}
        if said := self._said.get(model):
            found["said"] = said
            self._stated[model] = said, self._clock()
        return found

    def answered(self, model: str) -> None:
        """Note an answer of a model without a limit: more may follow."""
        if (sent := self._sent.get(model)) is not None and sent.ramp is not None:
            sent.ramp.answers += 1

    def stated(
        self, model: str, found: Mapping[str, Standing], seconds: float, *, is_limited: bool
    ) -> Operation | None:
        """Return the operation for an answer's headers; None where they change nothing.

        The answer took `seconds`. `is_limited`: the model has a limit; one without gets one where
        the provider leaves little room.
        """
        said = {kind: one.limit for kind, one in found.items()}
        self._say(model, said)
        before, at = self._stated.get(model, ({}, float("-inf")))
        left = {
            kind: one.remaining
            for kind, one in found.items()
            if seconds < FRESH and one.remaining is not None and one.remaining < one.limit / MINUTE
        }
        makes = not is_limited and self._is_short(model, found)
        is_new = said != before or (bool(left) and self._clock() - at >= FRESH)
        if not (is_new and (is_limited or makes)):
            return None
        self._stated[model] = said, self._clock()
        return {"op": "headers", "names": (model,), "said": said, "left": left, "make": makes}

    def _say(self, model: str, said: dict[str, float]) -> None:
        if model not in self._said and len(self._said) >= MOST_MODELS:
            self._said.clear()
            self._stated.clear()
        self._said[model] = said

    def _is_short(self, model: str, found: Mapping[str, Standing]) -> bool:
        """Return whether little is left, of a limit that our own calls do not prove wrong."""
        sent = self._sent.get(model)
        calls = sent.calls if sent else 0
        return any(one.is_scarce for one in found.values()) and (
            "r" not in found or found["r"].limit >= calls
        )


MOST_EXPECTED = 10_000


class Prompts:
    """Learns how much larger prompts are than expected: by schemas of tools, and a service's own.

    Whole prompts, and those of which all but the newest messages were measured, are learned apart.
    """

    def __init__(self) -> None:
        self._beside = {whole: AgentEstimates(0) for whole in (True, False)}
        self._expected: dict[str, tuple[int, int, bool]] = {}

    def expect(self, agent: str, hint: Work, counted: int, *, whole: bool) -> int:
        """Return the tokens of a step's prompt, of which so many were counted."""
        if len(self._expected) >= MOST_EXPECTED:
            self._expected.clear()
        # A claim counts a step once more.
        if self._expected.get(hint.run_id, (-1,))[0] != hint.step:
            self._expected[hint.run_id] = hint.step, counted, whole
        return counted + self._beside[whole].of(agent)

    def learn(self, agent: str, hint: Work, tokens: int) -> None:
        """Note how many tokens the prompt of a step had."""
        step, counted, whole = self._expected.pop(hint.run_id, (-1, 0, True))
        if step == hint.step:
            self._beside[whole].learn(agent, max(tokens - counted, 0))
