"""Follows one run from anywhere: its events, the text as it is written, its steps.

Reads the run's own records whenever it has moved, so that who comes late or comes back misses
nothing. Writes nothing; a follower that stands still or goes costs workers nothing.
"""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from stepfleet.orchestrator.client.watch import RunWatch, Standing
from stepfleet.orchestrator.events.envelope import EventType
from stepfleet.orchestrator.events.streamed_text import StreamedText
from stepfleet.orchestrator.records.steps import StepResult
from stepfleet.orchestrator.store.events.text_chunks import Chunks
from stepfleet.orchestrator.store.opening.opening import OpenStore
from stepfleet.orchestrator.store.runs.reading import Runs

LAST_CHUNK_SECONDS = 2.0
LAST_CHUNK_LOOK = 0.1
Envelopes = AsyncGenerator[dict[str, Any], None]
Steps = AsyncGenerator[StepResult, None]


@dataclass
class _Writing:
    """How far a follower has read a run that tells its text: events, chunks, and what they make."""

    after: str = "0"
    sequence: int = 0
    step: int = 0
    at: str = "0"
    text: StreamedText = field(default_factory=StreamedText)

    def hear(self, event: dict[str, Any]) -> None:
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
        """Yield the events behind number `since` until the run has ended, and the text's chunks.

        Raises `ConfigurationError` for an unknown run.
        """
        stored = await self._runs.get(run_id)
        if not chunks or not stored.config.broadcast.include_stream_chunks:
            async for event in self.events(run_id):
                if event["sequence"] > since:
                    yield event
            return
        writing = _Writing()
        standing: Standing | None = None
        while True:
            standing = await self._watch.moved(run_id, standing, chunks=True)
            async for one in self._with_text(run_id, writing, standing):
                if one.get("sequence", since + 1) > since:
                    yield one
            if standing.is_over:
                async for chunk in self._last_text(run_id, writing):
                    yield chunk
                return

    async def events(self, run_id: str) -> Envelopes:
        """Yield the run's events, those to come too, until it has ended."""
        after, newest = "0", 0
        standing: Standing | None = None
        while True:
            standing = await self._watch.moved(run_id, standing)
            while newest < standing.events:
                told, after = await self._runs.events(run_id, after)
                for event in told:
                    yield event
                    newest = event["sequence"]
                if not told:
                    break
            if standing.is_over:
                return

    async def _with_text(self, run_id: str, writing: "_Writing", standing: Standing) -> Envelopes:
        """Yield what text and events there are; the text first, since its step ends behind it."""
        while True:
            written = await self._written(run_id, writing)
            for chunk in written:
                yield chunk
            told: list[dict[str, Any]] = []
            if writing.sequence < standing.events:
                told, writing.after = await self._runs.events(run_id, writing.after)
            for event in told:
                writing.hear(event)
                yield event
            if not told and not written:
                return

    async def _written(self, run_id: str, writing: "_Writing") -> list[dict[str, Any]]:
        written, writing.at = await self._chunks.read(run_id, writing.at)
        for chunk in written:
            writing.text.add(chunk)
        return written

    async def _last_text(self, run_id: str, writing: "_Writing") -> Envelopes:
        """Yield what of the text comes a moment behind the commit; it may never come."""
        clock = asyncio.get_running_loop().time
        till = clock() + LAST_CHUNK_SECONDS
        while not writing.text.is_whole(writing.step) and clock() < till:
            written = await self._written(run_id, writing)
            for chunk in written:
                yield chunk
            if not written:
                await asyncio.sleep(LAST_CHUNK_LOOK)

    async def steps(self, run_id: str) -> Steps:
        """Yield the results of the run's steps as they are committed, until it has ended.

        A step that a retry takes back comes again when it was done anew.
        """
        async for event in self.envelopes(run_id, 0, chunks=False):
            if event["type"] == EventType.STEP_COMPLETED:
                found = await self._runs.step(run_id, event["payload"]["step_number"])
                if found is not None:
                    yield found
