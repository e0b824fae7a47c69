"""Follows one run from anywhere: its events, the text while it is written, its steps.

Reads the run's own records whenever it has moved: late readers and those that reconnect miss
nothing. Writes nothing; a slow or absent follower costs workers nothing.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any

from stepfleet.orchestrator.client.watching.watch import Position, RunWatch
from stepfleet.orchestrator.events.envelope import EventType, StreamedText
from stepfleet.orchestrator.records.state import TERMINAL
from stepfleet.orchestrator.records.steps import StepResult
from stepfleet.orchestrator.store.store import Store

LAST_CHUNK_SECONDS = 2.0
LAST_CHUNK_LOOK = 0.1
_ENDS = (EventType.STEP_COMPLETED, EventType.STEP_RETRIED)
_STARTS = (EventType.STEP_STARTED, EventType.TOOL_STARTED)
Envelopes = AsyncGenerator[dict[str, Any], None]
Steps = AsyncGenerator[StepResult, None]


class LiveStarts:
    """The starts of steps and tools that a follower has seen before their commit.

    Each attempt's start comes once: live, and then its event is left out, or as the event. A live
    start that comes after the end of its attempt is late, and left out.
    """

    def __init__(self) -> None:
        self._seen: dict[int, set[tuple[int, str]]] = {}
        self._ended: dict[int, str] = {}
        self._step = 0

    def add(self, start: Mapping[str, Any]) -> bool:
        """Take a live start; return whether it is new."""
        payload = start["payload"]
        step = payload["step_number"]
        if start["timestamp"] <= self._ended.get(step, ""):
            return False
        seen, one = self._seen.setdefault(step, set()), (payload["attempt"], _call(payload))
        is_new = one not in seen
        seen.add(one)
        return is_new

    def covers(self, event: Mapping[str, Any]) -> bool:
        """Take an event with a number; return whether its live form was seen."""
        payload, kind = event["payload"], event["type"]
        if kind == EventType.STEP_STARTED:
            self._step = payload["step_number"]
        elif kind in _ENDS:
            self._ended[payload["step_number"]] = event["timestamp"]
            if kind == EventType.STEP_COMPLETED:
                self._seen.pop(payload["step_number"], None)
        seen = self._seen.get(self._step, ()) if kind in _STARTS else ()
        return any(call == _call(payload) for _, call in seen)


def _is_end(event: Mapping[str, Any]) -> bool:
    """Return whether the event ends the run."""
    return event["type"] == EventType.STATUS and event["payload"].get("status") in TERMINAL


def _call(payload: Mapping[str, Any]) -> str:
    return str(payload.get("tool_call_id", ""))


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
    starts: LiveStarts = field(default_factory=LiveStarts)

    def apply(self, event: dict[str, Any]) -> bool:
        """Take an event; return whether it is new to the follower."""
        self.sequence = event["sequence"]
        if event["type"] == EventType.STEP_COMPLETED:
            self.step = event["payload"]["step_number"]
        return not self.starts.covers(event)


class RunFollower:
    """Follows runs of an open store."""

    def __init__(self, store: Store, watch: RunWatch) -> None:
        self._runs = store.runs
        self._watch = watch
        self._chunks = store.chunks

    async def envelopes(self, run_id: str, since: int, *, chunks: bool) -> Envelopes:
        """Yield the events after number `since` until the run has ended, and the text's chunks.

        Raises `ConfigurationError` for an unknown run.
        """
        streams = (await self._runs.get(run_id)).config.broadcast.include_stream_chunks
        progress = _Progress(run_id, chunks and streams)
        position: Position | None = None
        end: dict[str, Any] | None = None  # of the run, as far as known: after all of its text
        while True:
            position = await self._watch.moved(run_id, position, chunks=progress.chunks)
            async for one in self._new(progress, position):
                if one.get("sequence", since + 1) <= since:
                    continue
                if end and "sequence" in one:
                    yield end
                    end = None
                if progress.chunks and _is_end(one):
                    end = one
                else:
                    yield one
            if position.is_over:
                async for chunk in self._last_text(progress, position):
                    yield chunk
                if end:
                    yield end
                return

    async def _new(self, progress: _Progress, position: Position) -> Envelopes:
        """Yield new text and events; the text first, since the event that ends it comes after.

        Starts of work that no event covers yet come last: all before them is known then.
        """
        waiting: list[dict[str, Any]] = []
        while True:
            written = await self._written(progress)
            for chunk in written:
                if chunk["type"] == EventType.STREAM_CHUNK:
                    yield chunk
                else:
                    waiting.append(chunk)
            events: list[dict[str, Any]] = []
            if progress.sequence < position.events:
                events, progress.after = await self._runs.events(progress.run_id, progress.after)
            for event in events:
                if progress.apply(event):
                    yield event
            if not events and not written:
                break
        for start in waiting:
            if progress.starts.add(start):
                yield start

    async def _written(self, progress: _Progress) -> list[dict[str, Any]]:
        if not progress.chunks:
            return []
        written, progress.chunk_id = await self._chunks.read(progress.run_id, progress.chunk_id)
        for chunk in written:
            progress.text.add(chunk)
        return written

    async def _last_text(self, progress: _Progress, position: Position) -> Envelopes:
        """Yield chunks that arrive a moment after the commit; some may never arrive."""
        clock = asyncio.get_running_loop().time
        until = clock() + (await self._left(position) if progress.chunks else 0)
        while clock() < until and not progress.text.is_whole(progress.step):
            written = await self._written(progress)
            for chunk in written:
                if chunk["type"] == EventType.STREAM_CHUNK:
                    yield chunk
            if not written:
                await asyncio.sleep(LAST_CHUNK_LOOK)

    async def _left(self, position: Position) -> float:
        """Return for how many seconds the text of a run that has ended may still arrive."""
        ended = int(position.updated or 0) / 1000
        return ended + LAST_CHUNK_SECONDS - (await self._runs.now()).timestamp()

    async def steps(self, run_id: str) -> Steps:
        """Yield the results of the run's steps as they are committed, until it has ended.

        A step that a retry takes back is yielded again when it is committed anew.
        """
        async for event in self.envelopes(run_id, 0, chunks=False):
            if event["type"] == EventType.STEP_COMPLETED:
                found = await self._runs.step(run_id, event["payload"]["step_number"])
                if found is not None:
                    yield found
