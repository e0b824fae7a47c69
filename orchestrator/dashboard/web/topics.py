"""What the topics of open pages are read from. Each generator yields when something has changed.

They yield at once, too, since what was before is not known, and end where Redis is away.
"""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from stepfleet.orchestrator.client.fleet import AsyncFleet
from stepfleet.orchestrator.client.session import Client
from stepfleet.orchestrator.client.watching.watch import Position
from stepfleet.orchestrator.events.envelope import EventType
from stepfleet.orchestrator.events.streamed_text import StreamedText
from stepfleet.orchestrator.store.events.feeds import Chunks
from stepfleet.orchestrator.store.keys import WORKERS
from stepfleet.orchestrator.store.opening.opening import OpenStore
from stepfleet.orchestrator.store.runs.listing import LISTS

SECONDS = 1.0
"""The least time between two changes of a topic."""
FLEET_SECONDS = 2.0
LONGEST_TEXT = 20_000
"""Characters of a text that are sent while it is written: its end."""
States = AsyncGenerator[Any, None]


class Topics:
    """Reads what pages show of one fleet."""

    def __init__(self, fleet: AsyncFleet) -> None:
        self._session = fleet._session  # noqa: SLF001 - no part of the public client

    async def _client(self) -> Client:
        client = await self._session.open()
        client.standstill.report = _ignore  # the page of the fleet says it
        return client

    async def run(self, run_id: str) -> States:
        """Yield when the run has moved."""
        client = await self._client()
        position: Position | None = None
        while True:
            position = await client.watch.moved(run_id, position)
            yield None
            await asyncio.sleep(SECONDS)

    async def text(self, run_id: str) -> States:
        """Yield the text of the run's newest model call as far as it is written."""
        client = await self._client()
        chunks = Chunks(client.store.connection, client.store.keys)
        text, step, after = StreamedText(), 0, "0"
        position: Position | None = None
        while True:
            position = await client.watch.moved(run_id, position, chunks=True)
            written, after = await chunks.read(run_id, after)
            while written:
                for chunk in written:
                    if chunk["type"] != EventType.STREAM_CHUNK:
                        continue
                    number = chunk["payload"]["step_number"]
                    if number > step:
                        text, step = StreamedText(), number
                    if number == step:
                        text.add(chunk)
                written, after = await chunks.read(run_id, after)
            if step:
                yield {
                    "step": step,
                    "text": text.text[-LONGEST_TEXT:],
                    "left_out": max(len(text.text) - LONGEST_TEXT, 0),
                    "is_open": text.is_open,
                }
            await asyncio.sleep(SECONDS)

    async def batch(self, batch_id: str) -> States:
        """Yield when counters of the batch have changed."""
        client = await self._client()
        before: object = None
        while True:
            manifest = await client.batches.find(batch_id)
            found = manifest, await client.batches.counters(batch_id)
            if found != before:
                before = found
                yield None
            await asyncio.sleep(SECONDS)

    async def fleet(self) -> States:
        """Yield when a list of runs or a worker's report has changed, and while runs are active."""
        store = (await self._client()).store
        before: object = None
        while True:
            is_active, found = await _fleet(store)
            if is_active or found != before:
                before = found
                yield None
            await asyncio.sleep(FLEET_SECONDS)


async def _fleet(store: OpenStore) -> tuple[bool, object]:
    """Return whether runs are active, and what differs when something has happened."""
    shards = range(store.keys.shards)
    due = [("ZCARD", store.keys.due(shard)) for shard in shards]
    lists = [("ZCARD", f"{store.keys.tag(s)}runs:{name}") for s in shards for name in LISTS]
    counts = await store.connection.execute_all(*due, *lists)
    workers = await store.connection.execute("HKEYS", store.keys.of(WORKERS))
    paused = await store.connection.execute("HGETALL", store.keys.flags(0))
    return any(counts[: len(due)]), (counts, sorted(workers), paused)


def _ignore(_: str) -> None:
    return None
