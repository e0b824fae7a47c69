"""What the topics of open pages are read from. Each generator yields when something has changed.

They yield at once, too, since what was before is not known, and end where Redis is away.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Collection
from typing import Any

from stepfleet.orchestrator.client.fleet import AsyncFleet, store_of
from stepfleet.orchestrator.client.watching.watch import Position, RunWatch
from stepfleet.orchestrator.events.envelope import EventType
from stepfleet.orchestrator.events.streamed_text import StreamedText
from stepfleet.orchestrator.store.keys import LIMIT_SETTINGS, WORKERS
from stepfleet.orchestrator.store.limits import VERSION
from stepfleet.orchestrator.store.runs.listing import LISTS
from stepfleet.orchestrator.store.store import Store

SECONDS = 1.0
"""The least time between two changes of a topic."""
FLEET_SECONDS = 2.0
SIZES_EVERY = 4
"""Every so many looks at a quiet fleet read the sizes of all lists of runs."""
LONGEST_QUIET = 15.0
"""Seconds after which the fleet is shown anew in any case: workers may have fallen silent."""
ENDED_SECONDS = 3.0
"""Between two looks at a run that has ended: a retry brings it back."""
LONGEST_TEXT = 20_000
"""Characters of a text that are sent while it is written: its end."""
States = AsyncGenerator[Any, None]


class Topics:
    """Reads what pages show of one fleet."""

    def __init__(self, fleet: AsyncFleet) -> None:
        self._fleet = fleet
        self._watch: RunWatch | None = None

    async def run(self, run_id: str) -> States:
        """Yield when the run has moved."""
        position: Position | None = None
        while True:
            position = await self._moved(run_id, position)
            yield None
            await asyncio.sleep(SECONDS)

    async def text(self, run_id: str) -> States:
        """Yield the text of the run's newest model call as far as it is written."""
        chunks = (await store_of(self._fleet)).chunks
        text, step, after = StreamedText(), 0, "0"
        position: Position | None = None
        while True:
            position = await self._moved(run_id, position, chunks=True)
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
        batches = (await store_of(self._fleet)).batches
        before: object = None
        while True:
            manifest = await batches.find(batch_id)
            found = manifest, await batches.counters(batch_id)
            if found != before:
                before = found
                yield None
            await asyncio.sleep(SECONDS)

    async def fleet(self) -> States:
        """Yield when the fleet has changed, while runs are active, and now and then: is it paused?

        Runs that end between two looks are found by the sizes of all lists: those are read rarely.
        """
        store = await store_of(self._fleet)
        before: object = None
        lists: object = None
        quiet, at = 0, float("-inf")
        while True:
            is_active, found, flags = await _fleet(store)
            quiet = 0 if is_active else quiet + 1
            if quiet % SIZES_EVERY == 1:
                lists = await _sizes(store)
            if is_active or (found, lists) != before or time.monotonic() - at > LONGEST_QUIET:
                before, at = (found, lists), time.monotonic()
                yield {"paused": "fleet" in flags}
            await asyncio.sleep(FLEET_SECONDS)

    async def _moved(self, run_id: str, seen: Position | None, *, chunks: bool = False) -> Position:
        """Return the position of a run that has moved; one that has ended is looked at rarely."""
        # Why nothing moves is not its business: the page of the fleet says it.
        watch = self._watch = self._watch or RunWatch(await store_of(self._fleet))
        if seen is None or not seen.is_over:
            return await watch.moved(run_id, seen, chunks=chunks)
        newest = seen
        while newest == seen:
            await asyncio.sleep(ENDED_SECONDS)
            newest = await watch.moved(run_id, chunks=chunks)
        return newest


async def _fleet(store: Store) -> tuple[bool, object, Collection[str]]:
    """Return whether runs are active, what differs when something has happened, and the flags."""
    found = store.keys
    *counts, workers, flags, limits = await store.connection.execute_all(
        *(("ZCARD", found.due(shard)) for shard in range(found.shards)),
        ("HKEYS", found.of(WORKERS)),
        ("HGETALL", found.flags(0)),
        ("HGET", found.of(LIMIT_SETTINGS), VERSION),
    )
    return any(counts), (counts, sorted(workers), flags, limits), flags


async def _sizes(store: Store) -> list[int]:
    """Return the sizes of all lists of runs."""
    tags = [store.keys.tag(shard) for shard in range(store.keys.shards)]
    lists = [f"{tag}runs:{name}" for tag in tags for name in LISTS]
    return await store.connection.execute_all(*(("ZCARD", name) for name in lists))
