"""Follows one run from anywhere: its events, the text as it is written, its steps.

Looks again and again at the run's own records, so that who comes late or comes back misses
nothing. Writes nothing; a follower that stands still or goes costs workers nothing.
"""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from stepfleet.orchestrator.events import EventType
from stepfleet.orchestrator.records.steps import StepResult
from stepfleet.orchestrator.store.batches import Batches
from stepfleet.orchestrator.store.chunks import Chunks
from stepfleet.orchestrator.store.opening import OpenStore
from stepfleet.orchestrator.store.reading import Runs
from stepfleet.orchestrator.streamed_text import StreamedText

SHORTEST_LOOK = 0.02
LONGEST_LOOK = 0.25
LAST_CHUNK_SECONDS = 2.0
Envelopes = AsyncGenerator[dict[str, Any], None]
Steps = AsyncGenerator[StepResult, None]


class Following:
    """Follows runs of an open store."""

    def __init__(self, store: OpenStore, runs: Runs, batches: Batches) -> None:
        self._runs = runs
        self._batches = batches
        self._chunks = Chunks(store.connection, store.keys)

    async def envelopes(self, run_id: str, since: int, *, chunks: bool) -> Envelopes:
        """Yield the events behind number `since` until the run has ended, and the text's chunks.

        Raises `ConfigurationError` for an unknown run.
        """
        stored = await self._runs.get(run_id)
        chunks = chunks and stored.config.broadcast.include_stream_chunks
        after, at, look, text = "0", "0", SHORTEST_LOOK, StreamedText()
        clock, over_at, newest = asyncio.get_running_loop().time, 0.0, 0
        while True:
            (status,) = await self._batches.statuses([run_id])
            written: list[dict[str, Any]] = []
            if chunks:
                written, at = await self._chunks.read(run_id, at)
            told, after = await self._runs.events(run_id, after)
            for chunk in written:
                text.add(chunk)
                yield chunk
            for event in told:
                if event["type"] == EventType.STEP_COMPLETED:
                    newest = event["payload"]["step_number"]
                if event["sequence"] > since:
                    yield event
            if told or written:
                look = SHORTEST_LOOK
                continue
            if status is None or status.is_terminal:
                # The last chunks may come a moment behind the commit, or never.
                over_at = over_at or clock()
                is_told = not chunks or text.is_whole(newest)
                if is_told or clock() - over_at > LAST_CHUNK_SECONDS:
                    return
            await asyncio.sleep(look)
            look = min(look * 1.5, LONGEST_LOOK)

    async def steps(self, run_id: str) -> Steps:
        """Yield the results of the run's steps as they are committed, until it has ended.

        A step that a retry takes back comes again when it was done anew.
        """
        async for event in self.envelopes(run_id, 0, chunks=False):
            if event["type"] == EventType.STEP_COMPLETED:
                found = await self._runs.step(run_id, event["payload"]["step_number"])
                if found is not None:
                    yield found
