"""Publishes a step's start, its text and its tools' starts while they happen, in the background.

A call only appends to a list. One task per process sends what is gathered, a round trip at a time:
while Redis is slow, chunks grow longer instead of waiting in a queue. Knows no provider.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from typing import NamedTuple, Protocol, Self

from redis.exceptions import RedisError

from stepfleet.orchestrator.errors import AgentException
from stepfleet.orchestrator.events.envelope import Event, EventType
from stepfleet.orchestrator.protocol.claim import Claim
from stepfleet.orchestrator.protocol.waiting import TakenCall

log = logging.getLogger(__name__)

GATHER_SECONDS = 0.05


class ChunkStore(Protocol):
    """The store of chunks."""

    async def begin(self, run_id: str, step: int, *, anew: bool = True) -> int:
        """Return the number of a new attempt at a step, or of the newest one."""

    async def add(self, chunks: Sequence[Event]) -> None:
        """Write and publish chunks."""


class LiveStep(NamedTuple):
    """The step whose events are sent before its commit. `is_resumed`: its answer was known."""

    run_id: str
    number: int
    execution_id: str
    parent: str | None
    is_resumed: bool

    @classmethod
    def of(cls, work: Claim | TakenCall) -> Self:
        """Return the step of a claim, or of a tool call that is a task of its own."""
        if isinstance(work, Claim):
            state, resumed = work.state, work.journal.response is not None
            given = (work.run_id, work.number, state.info.execution_id, state.parent_agent_id)
            return cls(*given, resumed)
        run_id = work.hint.run_id
        execution = f"{run_id}:{work.execution}"
        return cls(run_id, work.hint.step + 1, execution, work.parent, work.attempt > 1)


class LiveWriter:
    """What one attempt at a step has to send: starts, and the text of a model call.

    `anew` takes the next number for the attempt; without it the newest attempt's is its own.
    """

    def __init__(
        self, step: LiveStep, wake: "Callable[[LiveWriter], None]", *, anew: bool = True
    ) -> None:
        self.step = step
        self.anew = anew
        self.attempt = 0
        self._index = 0
        self._starts: list[Event] = []
        self._pieces: list[str] = []
        self._taken: tuple[list[Event], list[str]] = [], []
        self._took_text = False
        self._is_complete = False
        self._wake = wake

    def start(self, event: Event) -> None:
        """Take the start of the step or of a tool."""
        self._starts.append(event)
        self._wake(self)

    def add(self, piece: str) -> None:
        """Take a piece of text from the model; an empty one is dropped."""
        if piece:
            self._pieces.append(piece)
            self._wake(self)

    def complete(self) -> None:
        """The model has answered; the rest is sent with the last chunk."""
        self._is_complete = True
        self._wake(self)

    def sent(self) -> None:
        """What was taken last was sent."""
        self._index += self._took_text
        self._taken = [], []

    def kept(self) -> None:
        """What was taken last was not sent: it goes with the next chunk."""
        starts, pieces = self._taken
        self._starts, self._pieces = [*starts, *self._starts], [*pieces, *self._pieces]
        self._taken = [], []

    def take(self, now: datetime) -> list[Event]:
        """Return the gathered starts, and the text as the next chunk. A piece is about a token."""
        self._taken = starts, pieces = self._starts, self._pieces
        self._starts, self._pieces = [], []
        number = {"step_number": self.step.number, "attempt": self.attempt}
        events = [one._replace(payload={**one.payload, **number}) for one in starts]
        self._took_text = bool(pieces) or self._is_complete
        if self._took_text:
            text = {"chunk": "".join(pieces), "tokens_delta": len(pieces)}
            payload = {
                **number,
                "chunk_index": self._index,
                **text,
                "is_complete": self._is_complete,
            }
            step = self.step
            given = (step.run_id, step.execution_id, now, payload, step.parent)
            events.append(Event(EventType.STREAM_CHUNK, *given))
        return events


class ChunkSender:
    """Sends what all steps of this process gather; what fails goes with the next piece.

    `failures` counts round trips that failed.
    """

    def __init__(self, store: ChunkStore, clock: Callable[[], Awaitable[datetime]]) -> None:
        self._store = store
        self._clock = clock
        self._waiting: dict[int, LiveWriter] = {}
        self._sending: asyncio.Task[None] | None = None
        self.failures = 0

    def begin(self, step: LiveStep, *, anew: bool = True) -> LiveWriter:
        """Return the writer of an attempt at a step. Belongs to the running event loop."""
        return LiveWriter(step, self._wake, anew=anew)

    async def settle(self, seconds: float) -> None:
        """Return when all that is gathered is sent, or after `seconds`."""
        if self._sending is not None and not self._sending.done():
            await asyncio.wait([self._sending], timeout=seconds)

    def _wake(self, writer: LiveWriter) -> None:
        self._waiting[id(writer)] = writer
        if self._sending is None or self._sending.done():
            self._sending = asyncio.get_running_loop().create_task(self._send())

    async def _send(self) -> None:
        while self._waiting:
            await asyncio.sleep(GATHER_SECONDS)
            ready, self._waiting = list(self._waiting.values()), {}
            try:
                await asyncio.gather(*(self._number(one) for one in ready if not one.attempt))
                now = await self._clock()
                await self._store.add([event for one in ready for event in one.take(now)])
            except (AgentException, RedisError, OSError) as error:
                log.warning("%d chunks of text were not sent: %s", len(ready), error)
                self.failures += 1
                for one in ready:
                    one.kept()
            else:
                for one in ready:
                    one.sent()

    async def _number(self, writer: LiveWriter) -> None:
        step = writer.step
        writer.attempt = await self._store.begin(step.run_id, step.number, anew=writer.anew)
