"""A batch's results: as runs end, or in the order of its lines. Reads; changes nothing."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, Protocol

from pydantic import alias_generators

from stepfleet.orchestrator.batches.files.tables import as_json
from stepfleet.orchestrator.records import exact_json
from stepfleet.orchestrator.records.batch import Manifest, is_stalled
from stepfleet.orchestrator.records.run.results import AgentRunResult
from stepfleet.orchestrator.records.state import NOT_COMPLETED, Lifecycle
from stepfleet.orchestrator.store.batches.batches import Batches, run_id_of
from stepfleet.orchestrator.store.runs.results import RunResults
from stepfleet.orchestrator.tools.schemas.handles import handle_of


def as_line(data: dict[str, Any]) -> bytes:
    """Return data as a line, with its line break."""
    try:
        return exact_json.dumps(data, default=str) + b"\n"
    except TypeError:  # integers beyond 64 bits, lone surrogates
        return as_json(data).encode("utf-8", "replace") + b"\n"


_in_snake_case = lru_cache(maxsize=1_000)(alias_generators.to_snake)
"""The names are few: those of the figures that criteria compare."""


def full(result: AgentRunResult) -> dict[str, Any]:
    """Return all fields of a result, the line's own id first; all names are in snake_case."""
    data = result.to_dict()
    for one in (data["outcome"] or {}).get("evaluations", ()):
        one["context"] = {_in_snake_case(name): value for name, value in one["context"].items()}
    return {"id": result.line_id or result.run_id, **data}


def slim(result: AgentRunResult) -> dict[str, Any]:
    """Return the answer, why the run stopped, what it cost, and its error, if there was one.

    `price_estimated` is there where the cost is by a default price, `usage_estimated` where tokens
    are counted here, and `finish_reason` where the answer was cut or filtered.
    """
    answer = "output" if result.structured is None else "structured"
    names = ("run_id", "status", "stop_reason", answer, "cost_usd", "end_time")
    data = result.model_dump(mode="json", include=set(names))
    line = {"id": result.line_id or result.run_id, **{name: data[name] for name in names}}
    if error := result.error or (result.last_error and str(result.last_error)):
        line["error"] = error
    if result.price_estimated:
        line["price_estimated"] = True
    if result.usage_estimated:
        line["usage_estimated"] = True
    if result.shortened:
        line["finish_reason"] = result.finish_reason
    return line


log = logging.getLogger(__name__)

SHORTEST_WAIT = 0.05
LONGEST_WAIT = 1.0
LEFT_PER_SECOND = 2_000
READ_AT_ONCE = 100
ROWS_AT_ONCE = 500
Results = AsyncGenerator[AgentRunResult, None]


class Tick(Protocol):
    """Learns of each poll of a wait."""

    async def __call__(self, *, idle: bool) -> None:
        """`idle`: nothing was found."""


class Pause:
    """Waits between polls: briefly while there is progress, up to a second without.

    It is longer where many runs are `left`: then a poll finds many together, and the end is far.
    `tick` learns of each poll whether it found nothing.
    """

    def __init__(self, tick: Tick | None = None) -> None:
        self._seconds = SHORTEST_WAIT
        self._tick = tick

    async def wait(self, *, idle: bool, left: int = 0) -> None:
        """Wait; longer than the last time if nothing was found."""
        seconds = self._seconds * 1.5 if idle else SHORTEST_WAIT
        self._seconds = min(max(seconds, left / LEFT_PER_SECOND), LONGEST_WAIT)
        if self._tick:
            await self._tick(idle=idle)
        await asyncio.sleep(self._seconds)


class BatchResults:
    """Reads the results of one batch, except those whose ends are `known` by their run ids.

    `tick` learns of each poll whether it found nothing.
    """

    def __init__(
        self,
        manifest: Manifest,
        batches: Batches,
        results: RunResults,
        tick: Tick,
        known: Mapping[str, datetime | None] | None = None,
    ) -> None:
        self._known = known or {}
        self.properties: dict[str, Any] = {}
        """The properties of the answers' JSON Schemas, of all results that were read so far."""
        self._schema: dict[str, Any] | None = None
        self._manifest = manifest
        self._batches = batches
        self._results = results
        self._tick = tick

    async def as_they_end(self, *, follow: bool, failed: bool) -> Results:
        """Yield results in the order of their ending, shard by shard.

        A run that is retried while this goes on comes again. Archived runs come last, in the order
        of the lines.
        """
        batch_id, given = self._manifest.batch_id, set[int]()
        places: dict[int, int] = {}
        seen, pause = 0, Pause(self._tick)
        while True:
            # In this order: what is sealed gets no more runs, and a run that is not open any
            # more is in the index when that is read afterwards.
            over = not follow or await self._is_over()
            found = await self._batches.ended_after(batch_id, places, READ_AT_ONCE)
            run_ids = [run_id for ended in found for run_id in ended.run_ids]
            async for result in self._read(run_ids, failed=failed):
                if result.row is not None:
                    given.add(result.row)
                yield result
            places |= {ended.shard: ended.place for ended in found}
            seen += len(run_ids)
            if over and not found:
                break
            if not over and len(run_ids) < READ_AT_ONCE:
                await pause.wait(idle=not found, left=self._manifest.rows - seen)
        manifest = self._manifest = await self._batches.get(batch_id)
        if not manifest.archived:
            return
        for first in range(0, manifest.rows, ROWS_AT_ONCE):
            rows = range(first, min(first + ROWS_AT_ONCE, manifest.rows))
            run_ids = [run_id_of(batch_id, row) for row in rows if row not in given]
            statuses = await self._batches.statuses(run_ids)
            pairs = zip(run_ids, statuses, strict=True)
            ended = [run_id for run_id, status in pairs if status and status.is_terminal]
            async for result in self._read(ended, failed=failed):
                yield result

    async def in_order(self, *, follow: bool, failed: bool) -> Results:
        """Yield results in the order of the lines; a line that was skipped is left out."""
        row = 0
        pause = Pause(self._tick)
        while True:
            over = not follow or await self._is_over()
            if row >= self._manifest.rows:
                if over or self._manifest.sealed:
                    return
                await pause.wait(idle=True)
                continue
            rows = range(row, min(row + ROWS_AT_ONCE, self._manifest.rows))
            run_ids = [run_id_of(self._manifest.batch_id, one) for one in rows]
            statuses = await self._batches.statuses(run_ids)
            ready = len(rows) if over else _ready(statuses, sealed=self._manifest.sealed)
            ended = [
                run_id
                for run_id, status in zip(run_ids[:ready], statuses, strict=False)
                if status is not None and status.is_terminal
            ]
            async for result in self._read(ended, failed=failed):
                yield result
            row += ready
            if ready < len(rows):
                await pause.wait(idle=ready == 0)

    async def _is_over(self) -> bool:
        """Whether no more results come: no run is open or created, or the batch is held."""
        manifest = self._manifest = await self._batches.get(self._manifest.batch_id)
        if manifest.held and (progress := await self._batches.progress(manifest)).halted:
            log.warning(
                "no more results come of batch %s: %s", manifest.batch_id, progress.held_text
            )
            return True
        is_whole = manifest.sealed or manifest.cancel_requested
        if not is_whole and not is_stalled(manifest, await self._batches.now()):
            return False
        return not await self._batches.open_runs(manifest.batch_id)

    async def _read(self, run_ids: Sequence[str], *, failed: bool) -> Results:
        for start in range(0, len(run_ids), READ_AT_ONCE):
            chunk = list(run_ids[start : start + READ_AT_ONCE])
            if failed:
                chunk = await self._batches.in_states(chunk, NOT_COMPLETED)
            chunk = await self._unknown(chunk)
            async for result, config in self._results.read(chunk):
                self._note(config.output_schema)
                yield result

    async def _unknown(self, run_ids: list[str]) -> list[str]:
        known = [run_id for run_id in run_ids if self._known.get(run_id)]
        if not known:
            return run_ids
        ends = zip(known, await self._batches.ends(known), strict=True)
        same = {run_id for run_id, ended in ends if ended == self._known[run_id]}
        return [run_id for run_id in run_ids if run_id not in same]

    def _note(self, schema: dict[str, Any] | None) -> None:
        if schema is not self._schema:
            self._schema = schema
            # A new object: readers notice it.
            self.properties = {**self.properties, **_properties(schema)}


def _properties(schema: dict[str, Any] | None) -> dict[str, Any]:
    """Return the properties that answers of a schema have."""
    if schema is None or handle_of(schema).holds_value:
        return {}
    found: dict[str, Any] = schema.get("properties", {})
    return found


def _ready(statuses: Sequence[Lifecycle | None], *, sealed: bool) -> int:
    """Return how many rows at the front have ended, or are missing from a sealed batch."""
    for index, status in enumerate(statuses):
        if not (sealed if status is None else status.is_terminal):
            return index
    return len(statuses)
