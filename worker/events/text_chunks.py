"""Publishes the text of model calls while it is written, in coalesced chunks, beside the steps.

A call only appends to a list. One task per process sends the gathered text, a round trip at a time:
while Redis is slow, chunks grow longer instead of waiting in a queue. Knows no provider.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from typing import Protocol

from redis.exceptions import RedisError

from stepfleet.orchestrator.errors import AgentException
from stepfleet.orchestrator.events.envelope import Event, EventType
from stepfleet.orchestrator.protocol.claim import Claim

log = logging.getLogger(__name__)

GATHER_SECONDS = 0.05


class ChunkStore(Protocol):
    """The store of chunks."""

    async def begin(self, run_id: str, step: int) -> int:
        """Return the number of a new attempt at a step's text."""

    async def add(self, chunks: Sequence[Event]) -> None:
        """Write and publish chunks."""


class TextWriter:
    """The text of one model call that is written and not yet sent."""

    def __init__(self, claim: Claim, wake: "Callable[[TextWriter], None]") -> None:
        self.claim = claim
        self.attempt = 0
        self._index = 0
        self._pieces: list[str] = []
        self._taken: list[str] = []
        self._is_complete = False
        self._wake = wake

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
        """The chunk taken last was sent."""
        self._index += 1
        self._taken = []

    def kept(self) -> None:
        """The chunk taken last was not sent: its text goes with the next one."""
        self._pieces, self._taken = [*self._taken, *self._pieces], []

    def take(self, now: datetime) -> Event:
        """Return the gathered text as the next chunk. A piece is about one token."""
        self._taken, self._pieces = self._pieces, []
        payload = {
            "step_number": self.claim.number,
            "attempt": self.attempt,
            "chunk_index": self._index,
            "chunk": "".join(self._taken),
            "tokens_delta": len(self._taken),
            "is_complete": self._is_complete,
        }
        state = self.claim.state
        return Event(
            EventType.STREAM_CHUNK,
            self.claim.run_id,
            state.info.execution_id,
            now,
            payload,
            state.parent_agent_id,
        )


class ChunkSender:
    """Sends the text of all calls of this process; a failed chunk goes with the next piece.

    `failures` counts round trips that failed.
    """

    def __init__(self, store: ChunkStore, clock: Callable[[], Awaitable[datetime]]) -> None:
        self._store = store
        self._clock = clock
        self._waiting: dict[int, TextWriter] = {}
        self._sending: asyncio.Task[None] | None = None
        self.failures = 0

    def begin(self, claim: Claim) -> TextWriter:
        """Return the writer of a model call's text. Belongs to the running event loop."""
        return TextWriter(claim, self._wake)

    async def settle(self, seconds: float) -> None:
        """Return when all gathered text is sent, or after `seconds`."""
        if self._sending is not None and not self._sending.done():
            await asyncio.wait([self._sending], timeout=seconds)

    def _wake(self, writer: TextWriter) -> None:
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
                await self._store.add([one.take(now) for one in ready])
            except (AgentException, RedisError, OSError) as error:
                log.warning("%d chunks of text were not sent: %s", len(ready), error)
                self.failures += 1
                for one in ready:
                    one.kept()
            else:
                for one in ready:
                    one.sent()

    async def _number(self, writer: TextWriter) -> None:
        claim = writer.claim
        writer.attempt = await self._store.begin(claim.run_id, claim.number)
