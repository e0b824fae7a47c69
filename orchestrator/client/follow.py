"""Follows one run from anywhere: its events, the text while it is written, its steps.

Reads the run's own records whenever it has moved: late readers and those that reconnect miss
nothing. Writes nothing; a slow or absent follower costs workers nothing.
"""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from stepfleet.orchestrator.client.watch import Position, RunWatch
from stepfleet.orchestrator.events.envelope import EventType
from stepfleet.orchestrator.events.streamed_text import StreamedText
from stepfleet.orchestrator.records.steps import StepResult
from stepfleet.orchestrator.store.events.feeds import Chunks
from stepfleet.orchestrator.store.opening.opening import OpenStore
from stepfleet.orchestrator.store.runs.reading import Runs

LAST_CHUNK_SECONDS = 2.0
LAST_CHUNK_LOOK = 0.1
Envelopes = AsyncGenerator[dict[str, Any], None]
Steps = AsyncGenerator[StepResult, None]


@dataclass
class _Progress:
    """How far a follower has read a run: events, and with `chunks` the text too."""

    run_id: str
    chunks: bool
    after: str = "0"
    sequence: int = 0
    step: int = 0
    chunk_id: str = "0"
    text: StreamedText = field(default_factory=StreamedText)

    def apply(self, event: dict[str, Any]) -> None:
        self.sequence = event["sequence"]
        if event["type"] == EventType.STEP_COMPLETED:
            self.step = event["payload"]["step_number"]


class Following:
    """Follows runs of an open store."""

    def __init__(self, store: OpenStore, runs: Runs, watch: RunWatch) -> None:
        self._runs = runs
        self._watch = watch
        self._chunks = Chunks(store.connection, store.keys)

    async def envelopes(self, run_id: str, since: int, *, chunks: bool) -> Envelopes:
        """Yield the events after number `since` until the run has ended, and the text's chunks.

        Raises `ConfigurationError` for an unknown run.
        """
        streams = (await self._runs.get(run_id)).config.broadcast.include_stream_chunks
        progress = _Progress(run_id, chunks and streams)
        position: Position | None = None
        while True:
            position = await self._watch.moved(run_id, position, chunks=progress.chunks)
            async for one in self._new(progress, position):
                if one.get("sequence", since + 1) > since:
                    yield one
            if position.is_over:
                async for chunk in self._last_text(progress):
                    yield chunk
                return

    async def _new(self, progress: _Progress, position: Position) -> Envelopes:
        """Yield new text and events; the text first, since the event that ends it comes after."""
        while True:
            written = await self._written(progress)
            for chunk in written:
                yield chunk
            events: list[dict[str, Any]] = []
            if progress.sequence < position.events:
                events, progress.after = await self._runs.events(progress.run_id, progress.after)
            for event in events:
                progress.apply(event)
                yield event
            if not events and not written:
                return

    async def _written(self, progress: _Progress) -> list[dict[str, Any]]:
        if not progress.chunks:
            return []
        written, progress.chunk_id = await self._chunks.read(progress.run_id, progress.chunk_id)
        for chunk in written:
            progress.text.add(chunk)
        return written

    async def _last_text(self, progress: _Progress) -> Envelopes:
        """Yield chunks that arrive a moment after the commit; some may never arrive."""
        clock = asyncio.get_running_loop().time
        until = clock() + (LAST_CHUNK_SECONDS if progress.chunks else 0)
        while clock() < until and not progress.text.is_whole(progress.step):
            written = await self._written(progress)
            for chunk in written:
                yield chunk
            if not written:
                await asyncio.sleep(LAST_CHUNK_LOOK)

    async def steps(self, run_id: str) -> Steps:
        """Yield the results of the run's steps as they are committed, until it has ended.

        A step that a retry takes back is yielded again when it is committed anew.
        """
        async for event in self.envelopes(run_id, 0, chunks=False):
            if event["type"] == EventType.STEP_COMPLETED:
                found = await self._runs.step(run_id, event["payload"]["step_number"])
                if found is not None:
                    yield found
