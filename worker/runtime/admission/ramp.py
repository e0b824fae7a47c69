"""The first calls of a model of which nothing is known: ever more at once, and not a thousand.

A thousand calls that are sent together are refused together where the provider has a limit. The
first refusal takes a round trip to come; until then the fleet sends few enough: its workers share
one ramp by their number.
"""

import asyncio
from collections import deque
from collections.abc import Callable

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
