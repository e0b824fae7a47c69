"""Cancel, pause and resume of whole batches: in force at once on every shard, then run by run.

A request gets its number from the manifest, is stored as a flag on each shard, where the scripts of
steps read it, and is then applied to the batch's runs in pages: the sweep. A sweep may be
interrupted anywhere; any worker continues it by the manifest.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import orjson

from stepfleet.orchestrator.errors import NotFoundError, StoreError
from stepfleet.orchestrator.protocol.claim import Work
from stepfleet.orchestrator.records.batch import BatchHold, Manifest
from stepfleet.orchestrator.records.errors import ErrorInfo, cause_of
from stepfleet.orchestrator.store import keys
from stepfleet.orchestrator.store.batches.batches import Batches, run_id_of
from stepfleet.orchestrator.store.gateway import Gateway, Opened
from stepfleet.orchestrator.store.lua import load, run_script
from stepfleet.orchestrator.store.pace import SweepPace

ROWS = 1600
"""Rows in one page of a sweep."""
STALE_SECONDS = 10.0
"""A worker continues a sweep that has not moved for this time."""
MOST_AT_ONCE = 10
LONGEST_MESSAGE = 500
"""Characters of the error that `BatchHold` quotes."""
OnRows = Callable[[int], None]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A request to a batch: `word` is cancel, pause or resume; `fields` (JSON) are a cancel's."""

    batch_id: str
    rows: int
    word: str
    number: int
    fields: str = ""
    row: int = 0


@dataclass(slots=True)
class Swept:
    """The runs that a sweep has reached, and those of them that a worker may hold."""

    runs: int = 0
    held: int = 0


class BatchRequests(Gateway):
    """Makes requests to batches, and sweeps."""

    def __init__(self, opened: Opened, batches: Batches) -> None:
        super().__init__(opened)
        self._sweeps = opened.keys.of(keys.SWEEPS)
        self._batches = batches
        self._grace_ms = round(opened.settings.grace * 1000)

    async def ask(
        self, manifest: Manifest, word: str, token: str, fields: str = ""
    ) -> BatchRequest:
        """Put a request in force on all shards. Its repetition, by `token`, is the same one.

        Raises `NotFoundError` if there is no such batch any more.
        """
        batch_id = manifest.batch_id
        while True:
            # Noted first: workers know of a request whose client dies after `_ask`.
            noted = await self._note(batch_id)
            reply = await self._ask(batch_id, word, token, fields)
            if reply[0] != "sweeping":
                break
            unfinished = BatchRequest(batch_id, manifest.rows, *_parts(reply[1:]))
            await self.flag(unfinished)
            await self.sweep(unfinished)
        if reply[0] == "unknown":
            await self._unnote(batch_id, noted)
            raise NotFoundError(f"no batch has the id {batch_id!r}")
        request = BatchRequest(batch_id, manifest.rows, word, int(reply[1]), fields)
        await self._note(batch_id)
        await self.flag(request)
        return request

    async def hold(self, batch_id: str, error: ErrorInfo, model: str, token: str, most: int) -> int:
        """Count a run that is about to end with a permanent error; hold the batch after `most`.

        Errors are alike where they differ in a few words. Runs that end in another way between them
        reset the count. Returns 0 where the run may
        end, else the number of the request that holds the batch: then the run is to wait.
        """
        cause = cause_of(error, model)
        others = sum(map(_ended_otherwise, await self._batches.counters(batch_id)))
        held = BatchHold(runs=most, cause=cause, message=error.message[:LONGEST_MESSAGE])
        stored = [self._keys.manifest(batch_id)]
        place = cause.model_copy(update={"text": ""})
        given = (place.key, others, most, token, held.to_json(), cause.text)
        reply = await run_script(self._connection, "hold", stored, *given)
        number = int(reply[1])
        if reply[0] == "held":
            if reply[2]:  # whoever held the batch may have died
                await self._connection.execute("ZADD", self._sweeps, "NX", 0, batch_id)
            return number
        if number:
            log.warning("batch %s is held: %s", batch_id, held)
            # Any worker sweeps, and flags once more if this one dies.
            await self._connection.execute("ZADD", self._sweeps, 0, batch_id)
            await self.flag(BatchRequest(batch_id, 0, "pause", number))
        return 0

    async def pause_fleet(self, *, paused: bool) -> None:
        """Let no step or tool begin on any shard, or let them begin again."""
        verb, *value = ("HSET", "1") if paused else ("HDEL",)
        flags = map(self._keys.flags, range(self._keys.shards))
        await self._connection.execute_all(*((verb, one, "fleet", *value) for one in flags))

    async def flag(self, request: BatchRequest) -> None:
        """Put a request in force on each shard; doing it again changes nothing."""
        await self._flag(request, request.word)

    async def lift(self, request: BatchRequest) -> None:
        """Remove a request that all runs have received. No older one comes back."""
        await self._flag(request, "")

    async def sweep(self, request: BatchRequest, on_rows: OnRows = lambda _: None) -> Swept:
        """Apply the request to every run, in pages; a newer request ends it."""
        await load(self._connection, "sweep")
        swept, pace = Swept(), SweepPace(self._connection)
        noted = await self._note(request.batch_id)
        for first in range(request.row, request.rows, ROWS):
            last = min(first + ROWS, request.rows)
            if not await self._page(request, range(first, last), swept, pace):
                return swept
            if not await self._reached(request, str(last)):
                return swept
            noted = await self._note(request.batch_id)
            on_rows(last)
        if request.word != "pause":  # a pause applies to runs that are created later, too
            await self.lift(request)
        await self._batches.look_at(request.batch_id)
        if await self._reached(request, ""):
            await self._unnote(request.batch_id, noted)
        return swept

    async def go_on(self) -> int:
        """Finish sweeps that have not moved for some seconds; return how many.

        A request that cannot be finished is logged and tried again later, after the others.
        Raises `StoreError` when Redis stays out of reach.
        """
        finished = 0
        for batch_id, noted in await self._stale():
            try:
                finished += await self._finish(batch_id, noted)
            except StoreError:
                raise
            except Exception:
                log.exception("the request to batch %s is postponed", batch_id)
                await self._note(batch_id)
        return finished

    async def unfinished(self, batch_id: str) -> BatchRequest | None:
        """Return the batch's request that has not reached all its runs; None if there is none."""
        sweep, rows, order, created = await self._connection.execute(
            "HMGET", self._keys.manifest(batch_id), "sweep", "rows", "order", "created"
        )
        if not (sweep and rows and created):
            return None
        word, number, row = sweep.split()
        if word == "cancel" and not order:
            return None
        return BatchRequest(batch_id, int(rows), word, int(number), order or "", int(row))

    async def _stale(self) -> list[tuple[str, str]]:
        before = (await self._batches.now()).timestamp() - STALE_SECONDS
        limits = ("LIMIT", 0, MOST_AT_ONCE)
        found = await self._connection.execute(
            "ZRANGEBYSCORE", self._sweeps, "-inf", before, "WITHSCORES", *limits
        )
        return list(zip(found[::2], found[1::2], strict=True))

    async def _finish(self, batch_id: str, noted: str) -> bool:
        # Read now: during other sweeps, a client may have requested the contrary.
        request = await self.unfinished(batch_id)
        if not request:
            await self._unnote(batch_id, noted)
            return False
        await self._note(batch_id)
        await self.flag(request)
        await self.sweep(request)
        return True

    async def _page(
        self, request: BatchRequest, rows: range, swept: Swept, pace: SweepPace
    ) -> bool:
        """Apply the request to the runs of these rows; return False where a newer one is there."""
        run_ids = (run_id_of(request.batch_id, row) for row in rows)
        for group in pace.groups(sorted(run_ids, key=self._keys.shard_of)):
            found = await self.sweep_runs(request, group, pace)
            if found is None:
                return False
            swept.runs += found.runs
            swept.held += found.held
        return True

    async def sweep_runs(
        self, request: BatchRequest, run_ids: Sequence[str], pace: SweepPace
    ) -> Swept | None:
        """Apply the request to runs, sorted by shard; None where a newer one is in force."""
        parts = [list(part) for _, part in groupby(run_ids, key=self._keys.shard_of)]
        about = (request.batch_id, request.number, self._grace_ms)
        calls = [
            ("sweep", self._keys.script_keys(part[0], None), "", *about, *part) for part in parts
        ]
        replies = await pace.send(calls, len(run_ids))
        applied = [reply for reply in replies if reply[0] != "superseded"]
        hints = [
            (Work(run_id, int(step)), agent)
            for reply in applied
            for run_id, step, agent in zip(reply[3::3], reply[4::3], reply[5::3], strict=True)
        ]
        await self._dispatch.publish(hints)
        if len(applied) < len(replies):
            return None
        return Swept(sum(int(one[1]) for one in applied), sum(int(one[2]) for one in applied))

    async def _flag(self, request: BatchRequest, word: str) -> None:
        about = (request.batch_id, word, request.number, request.fields)
        await asyncio.gather(
            *(
                run_script(self._connection, "flag", [self._keys.due(shard)], *about)
                for shard in range(self._keys.shards)
            )
        )

    async def _ask(self, batch_id: str, word: str, token: str, fields: str) -> Any:
        stored = [self._keys.manifest(batch_id)]
        return await run_script(self._connection, "ask", stored, word, token, fields)

    async def _reached(self, request: BatchRequest, row: str) -> bool:
        """Note how far the sweep is ('' at its end); return whether it is still this one's."""
        stored = [self._keys.manifest(request.batch_id)]
        reply = await run_script(self._connection, "swept", stored, request.number, row)
        if reply == "gone":
            await self._batches.unflag(request.batch_id)
        return bool(reply == "noted")

    async def _note(self, batch_id: str) -> str:
        """Note that the sweep is under way, and return the time of the note."""
        now = f"{(await self._batches.now()).timestamp():.6f}"
        await self._connection.execute("ZADD", self._sweeps, now, batch_id)
        return now

    async def _unnote(self, batch_id: str, noted: str) -> None:
        """Remove the note of that time; a newer one stays."""
        await run_script(self._connection, "unnote", [self._sweeps], batch_id, noted)


def _ended_otherwise(counters: Mapping[str, str]) -> int:
    return sum(int(counters.get(f"status:{one}", 0)) for one in ("completed", "stopped"))


def _parts(reply: list[str]) -> tuple[str, int, str, int]:
    word, number, fields, row = reply
    return word, int(number), fields, int(row)


def cancel_fields(outcome: str, note: str, ending: dict[str, Any]) -> str:
    """Return the fields with which scripts end a run of a cancelled batch (JSON)."""
    fields = {"outcome": outcome, "note": note, **ending}
    return orjson.dumps({name: str(value) for name, value in fields.items()}).decode()
