"""Limits how many steps of a process work at once, apart from those that wait for something.

Where a thousand answers arrive together, a process that handles all of them before it commits one
sends all calls of the next round at its end, and is idle until they are answered. So an answer
waits while `most` steps are at work; steps that have begun finish first. Must not know steps.

Steps that are at work together also pass from phase to phase together, by a turn of the loop at
each boundary: the code of a phase then is in the processor's caches for all of them but the first
(docs/internals/performance.md has what that saves).
"""

import asyncio
from collections import deque

MOST = 64
"""Enough to fill the round trips to Redis, and over in less than a tenth of a second."""
STUCK_SECONDS = 0.5
"""Without progress for this time (a master of a cluster may be away), others are let in."""


class ConcurrencyLimiter:
    """Gives steps their turn. Belongs to one event loop.

    `with pacing:` counts a step; it never waits, as its message has done so. Inside of it,
    `async with pacing.elsewhere:` is for waiting for a model or for tools: the step is not counted
    then, and has to wait for its turn at the end. A cancelled step goes on at once. `with
    pacing.aside:` does the same without waiting.
    """

    def __init__(self, most: int = MOST, stuck: float = STUCK_SECONDS) -> None:
        self.elsewhere = _Elsewhere(self)
        self.aside = _Aside(self)
        self.at_work = 0
        self._most = most
        self._room = most  # more than that while some are stuck
        self._stuck = stuck
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._look: asyncio.TimerHandle | None = None
        self._moved = False

    @property
    def waiting(self) -> int:
        """How many steps wait for their turn."""
        return sum(not turn.done() for turn in self._waiting)

    def __enter__(self) -> None:
        """Count a step."""
        self.enter()

    def __exit__(self, *_: object) -> None:
        """Count it no more."""
        self.leave()

    def enter(self) -> None:
        """Count a step at once."""
        self.at_work += 1

    def leave(self) -> None:
        """Count a step no more, and let in those that wait."""
        self.at_work -= 1
        self._room = max(self._most, min(self._room, self.at_work + self._most))
        if self._waiting:
            self._let_in(self._room - self.at_work)

    async def turn(self) -> None:
        """Count a step as soon as few enough are at work."""
        if self.at_work < self._room and not self._waiting:
            self.at_work += 1
            await asyncio.sleep(0)
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._watch()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self.at_work += 1
            raise

    def _let_in(self, free: int) -> None:
        while free > 0 and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                self.at_work += 1
                self._moved = True
                free -= 1

    def _watch(self) -> None:
        if self._look is None:
            self._moved = False
            self._look = asyncio.get_running_loop().call_later(self._stuck, self._unstick)

    def _unstick(self) -> None:
        self._look = None
        if not self._moved:
            self._room = self.at_work + self._most  # those at work now take nobody's place
            self._let_in(self._most)
        if self._waiting:
            self._watch()


class _Elsewhere:
    def __init__(self, pacing: ConcurrencyLimiter) -> None:
        self._pacing = pacing

    async def __aenter__(self) -> None:
        self._pacing.leave()
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            self._pacing.enter()
            raise

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            await self._pacing.turn()
        else:
            self._pacing.enter()


class _Aside:
    def __init__(self, pacing: ConcurrencyLimiter) -> None:
        self._pacing = pacing

    def __enter__(self) -> None:
        self._pacing.leave()

    def __exit__(self, *_: object) -> None:
        self._pacing.enter()
