"""Limits how many steps of a process work at once, beside those that wait for something else.

Where a thousand answers arrive together, a process that handles all of them before it commits one
sends all calls of the next round at its end, and is idle until they are answered. So an answer
waits while `most` steps are at work; steps that have begun finish first. Must not know steps.

Steps that are at work together also pass from phase to phase together, by a turn of the loop at
each boundary: the code of a phase then is in the processor's caches for all of them but the first
(docs/internals/performance.md has what that saves).
"""

import asyncio
from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

from stepfleet.orchestrator.protocol.claim import StepHint
from stepfleet.orchestrator.protocol.waiting import ToolHint
from stepfleet.orchestrator.settings.signing import HEADER, SigningKeys
from stepfleet.orchestrator.tools.schemas.bounded_json import is_unicode

LONGEST_ID = 200
"""Characters of a run's id."""
HIGHEST = 2**31
"""Steps and calls are numbered below this."""

_STEP = ("run_id", "step")
_CALL = ("run_id", "step", "index")
_OF_OTHERS = ("callbacks", "errbacks", "chain", "chord", "eta", "expires", "group")
_NO_LIMITS = (None, [None, None], (None, None))


class Inadmissible(ValueError):  # noqa: N818 - a verdict
    """The message must not be acted on; the text is the reason."""


def step_hint(args: Sequence[Any], kwargs: dict[str, Any]) -> StepHint:
    """Return the step that a task's arguments name. Raises `Inadmissible`."""
    run_id, step = args if not kwargs and len(args) == len(_STEP) else _named(_STEP, args, kwargs)
    return StepHint(_run_id(run_id), _number("step", step))


def call_hint(args: Sequence[Any], kwargs: dict[str, Any]) -> ToolHint:
    """Return the tool call that a task's arguments name. Raises `Inadmissible`."""
    run_id, step, index = _named(_CALL, args, kwargs)
    return ToolHint(_run_id(run_id), _number("step", step), _number("index", index))


def check_limits(request: Any) -> None:
    """Raise `Inadmissible` for a hint with time limits: they are the worker's to set.

    A stranger's limit would count against the run as a timeout.
    """
    if request.timelimit not in _NO_LIMITS:
        raise Inadmissible("the message has time limits, which only a worker's options may set")


@dataclass(frozen=True, slots=True)
class Gate:
    """Lets those messages through that one of `keys` signed, for one of the queues read here.

    What the signature does not cover (time limits, tasks to be called afterwards) must be absent.
    """

    keys: SigningKeys
    queues: Callable[[], Container[str]]

    def check(self, task: str, args: list[Any], request: Any) -> None:
        """Return if Celery's `request` may be acted on. Raises `Inadmissible`."""
        queue = (request.delivery_info or {}).get("routing_key")
        signature = request.get(HEADER)
        if signature is None:
            raise Inadmissible("the message is not signed, and this worker has signing keys")
        if not self.keys.accepts(signature, task, queue, args):
            raise Inadmissible("no key of this worker made the message's signature")
        if queue not in self.queues():
            raise Inadmissible("the message was signed for a queue that this worker does not read")
        if request.timelimit not in _NO_LIMITS or any(map(request.get, _OF_OTHERS)):
            raise Inadmissible("the message was signed without the options that it has now")


def _named(names: tuple[str, ...], args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    by_name = [kwargs[name] for name in names[len(args) :] if name in kwargs]
    given = [*args, *by_name]
    if len(given) != len(names) or len(by_name) != len(kwargs):
        raise Inadmissible(f"the message's arguments are not {', '.join(names)}")
    return given


def _run_id(given: Any) -> str:
    if not isinstance(given, str) or not 0 < len(given) <= LONGEST_ID:
        raise Inadmissible(f"run_id is no text of 1 to {LONGEST_ID} characters")
    if not given.isascii() and not is_unicode(given):
        raise Inadmissible("run_id holds a lone surrogate, which is no valid Unicode")
    return given


def _number(name: str, given: Any) -> int:
    if not isinstance(given, int) or isinstance(given, bool) or not 0 <= given < HIGHEST:
        raise Inadmissible(f"{name} is no whole number from 0 below {HIGHEST}")
    return given


MOST = 64
"""Enough to fill the round trips to Redis, and over in less than a tenth of a second."""
STUCK_SECONDS = 0.5
"""Without progress for so long (a master of a cluster may be away), others are let in."""


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
