"""Lists runs, the newest first, from the lists of each shard; and the tree below a run.

A shard has a list of runs per status, and per stop reason of those that have ended, in the order of
their creation. Scripts keep them with the run's own records. Other conditions are held against the
headers of a bounded number of runs; the cursor says where to go on.
"""

import asyncio
import base64
import binascii
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self

import orjson

from stepfleet.orchestrator.archive.segments import ArchivedEntry
from stepfleet.orchestrator.errors import ConfigurationError, SerializationError
from stepfleet.orchestrator.records import exact_json
from stepfleet.orchestrator.records.batch import Manifest
from stepfleet.orchestrator.records.outcome import StopReason
from stepfleet.orchestrator.records.run.facts import end_state
from stepfleet.orchestrator.records.run.summary import RunPage, RunSummary, RunTree
from stepfleet.orchestrator.records.state import Lifecycle
from stepfleet.orchestrator.store import keys
from stepfleet.orchestrator.store.archived import Report, note_left_out
from stepfleet.orchestrator.store.batches.batches import run_id_of
from stepfleet.orchestrator.store.codec import Fields, milliseconds, moment
from stepfleet.orchestrator.store.compression import unpacked_within
from stepfleet.orchestrator.store.gateway import Gateway, Opened
from stepfleet.orchestrator.store.lua import run_script
from stepfleet.orchestrator.store.runs.links import Links
from stepfleet.orchestrator.store.runs.reading import unknown_run

MOST_RUNS = 500
LOOKS = 250
"""Runs of a shard that one call of the script looks at: less than a millisecond of Redis."""
ROUNDS = 8
ROWS = 2_000
MOST_ROWS = 8_000
LONGEST_ERROR = 500
LARGEST_STATE = 65_536
"""Bytes of a stored state that is read for a list."""
TIDY_MS = 5_000
TIDIED = 250
MOST_TIDIED = 40
"""Pages of one list that are put right in one turn, at most."""
LISTS = tuple(dict.fromkeys([*map(str, Lifecycle), *map(str, StopReason)]))
_FIELDS = (
    *("agent", "status", "stop_reason", "error", "batch", "line", "tenant", "created", "updated"),
    *("ended", "step", "max_steps", "crashes", "parent", "guessed", "estimated"),
)

_EQUAL = ("status", "stop_reason", "agent", "tenant", "parent")
Selected = Callable[[Sequence[str]], Awaitable[set[str]]]
"""Returns which of some runs are meant, by more than their headers."""
MOST_IN_TREE = 1_000
STEPS_AT_ONCE = 8
"""Steps of a run that are read at once."""
LARGEST_STEP = 4_194_304


@dataclass(frozen=True, slots=True)
class RunFilter:
    """Which runs are listed: all conditions that are given hold. `error` is a part of its text."""

    status: Lifecycle | None = None
    stop_reason: StopReason | None = None
    agent: str | None = None
    tenant: str | None = None
    parent: str | None = None
    error: str | None = None
    since: datetime | None = None
    batch: Manifest | None = None

    @property
    def lists(self) -> tuple[str, ...]:
        """The lists in which such runs are; none where the conditions exclude each other."""
        status, reason = self.status, self.stop_reason
        if reason is not None:
            return (reason.value,) if status in {None, end_state(reason)} else ()
        if status is None:
            return LISTS
        reasons = [one.value for one in StopReason if end_state(one) is status]
        return tuple(dict.fromkeys([status.value, *reasons]))

    @property
    def since_ms(self) -> int:
        """The earliest time of creation, in milliseconds."""
        return milliseconds(self.since) if self.since else 0

    def matches(self, header: Fields) -> bool:
        """Return whether a run with these fields of a header is meant."""
        equal = {name: getattr(self, name) for name in _EQUAL}
        is_equal = all(
            value is None or header.get(name, "") == value for name, value in equal.items()
        )
        text = (self.error or "").lower() in (header.get("error") or "").lower()
        return is_equal and text and int(header["created"]) >= self.since_ms


@dataclass(frozen=True, slots=True)
class Cursor:
    """The place after a run in the order of lists: its time of creation in ms, and its id.

    Of a batch it is the row of its run.
    """

    place: int
    run_id: str = ""

    def __str__(self) -> str:
        """Return the cursor as callers pass it on."""
        text = orjson.dumps([self.place, self.run_id])
        return base64.urlsafe_b64encode(text).decode().rstrip("=")

    @property
    def order(self) -> tuple[int, bytes]:
        """A key by which runs are sorted."""
        return self.place, self.run_id.encode()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the cursor in a text. Raises `ConfigurationError` for other text."""
        try:
            place, run_id = orjson.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
            if isinstance(place, int) and isinstance(run_id, str) and 0 <= place < 1 << 53:
                return cls(place, run_id)
        except (ValueError, TypeError, binascii.Error):
            pass
        msg = f"cursor is {ascii(text)[:80]}; write the `next` of the page before, as it is"
        raise ConfigurationError(msg)


@dataclass(frozen=True, slots=True)
class _Found:
    """What one shard has found. `last` is the run at which it stopped, None at its end."""

    runs: tuple[Cursor, ...]
    looked: int
    last: Cursor | None

    @classmethod
    def of(cls, reply: Sequence[Any]) -> Self:
        looked, place, run_id, *flat = reply
        runs = tuple(
            Cursor(int(float(at)), one) for at, one in zip(flat[::2], flat[1::2], strict=True)
        )
        return cls(runs, int(looked), Cursor(int(float(place)), run_id) if place else None)


class RunLists(Gateway):
    """Reads the lists of runs of one store, and puts them right; reads trees of runs."""

    def __init__(self, opened: Opened, links: Links) -> None:
        super().__init__(opened)
        self._links = links

    async def page(
        self,
        which: RunFilter,
        limit: int,
        cursor: Cursor | None = None,
        selected: Selected | None = None,
    ) -> RunPage:
        """Return up to `limit` runs after the cursor, only those `selected` where that is given.

        Raises `StoreError`.
        """
        looked = 0
        ids: list[str] = []
        if which.batch is not None:
            ids, looked, cursor = await self._of_batch(which.batch, which, limit, cursor, selected)
        elif which.lists:
            ids, looked, cursor = await self._of_lists(which, limit, cursor, selected)
        else:
            cursor = None
        runs = await self.summaries(ids, note_left_out)
        return RunPage(runs=runs, next=str(cursor) if cursor else None, looked_at=looked)

    async def _of_lists(
        self, which: RunFilter, limit: int, cursor: Cursor | None, selected: Selected | None
    ) -> tuple[list[str], int, Cursor | None]:
        ids: list[str] = []
        looked = 0
        for _ in range(ROUNDS):
            found = await self._shards(which, limit - len(ids), cursor)
            found.append(await self._archived(which, limit - len(ids), cursor))
            looked += sum(one.looked for one in found)
            # Before the place that every shard has reached nothing is missing.
            reached = max((one.last for one in found if one.last), key=_order, default=None)
            # The archive was asked last: a run that has just moved there is named twice.
            runs = sorted({run for one in found for run in one.runs}, key=_order, reverse=True)
            sure = [run for run in runs if reached is None or run.order >= reached.order]
            more = len(sure) > limit - len(ids)
            sure = sure[: limit - len(ids)]
            is_full = len(ids) + len(sure) == limit
            named = [run.run_id for run in sure]
            fitting = await selected(named) if selected and named else named
            ids += [run_id for run_id in named if run_id in fitting]
            cursor = sure[-1] if is_full and (more or reached) else reached
            if cursor is None or len(ids) == limit:
                break
        return ids, looked, cursor

    async def _shards(self, which: RunFilter, most: int, cursor: Cursor | None) -> list[_Found]:
        wanted = {name: getattr(which, name) for name in _EQUAL[2:]}
        equal = orjson.dumps({name: value for name, value in wanted.items() if value is not None})
        place = (cursor.place, cursor.run_id) if cursor else ("", "")
        error = (which.error or "").encode().lower().decode()  # ASCII alone, as Redis does
        # Runs are spread over the shards; where one has all of them, a few rounds find them.
        part = 8 + max(most * 3 // self._keys.shards, most // 6)
        given = (part, max(LOOKS, part), which.since_ms, *place, error, equal, *which.lists)
        # One after the other: between two of them Redis serves the fleet.
        return [
            _Found.of(await run_script(self._connection, "list", [self._keys.due(shard)], *given))
            for shard in range(self._keys.shards)
        ]

    async def _archived(self, which: RunFilter, most: int, cursor: Cursor | None) -> _Found:
        wanted = {name: getattr(which, name) for name in _EQUAL[2:]}
        wanted = {name: value for name, value in wanted.items() if value is not None}
        error = (which.error or "").encode().lower()

        def matches(entry: ArchivedEntry) -> bool:
            equal = all(getattr(entry, name) == value for name, value in wanted.items())
            return equal and entry.listed in which.lists and error in entry.error.encode().lower()

        place = cursor.order if cursor else None
        runs, looked, last = await self._reads.archived.page(matches, most, place, which.since_ms)
        found = tuple(Cursor(one.created, one.run_id) for one in runs)
        return _Found(found, looked, Cursor(last.created, last.run_id) if last else None)

    async def _of_batch(
        self,
        batch: Manifest,
        which: RunFilter,
        limit: int,
        cursor: Cursor | None,
        selected: Selected | None,
    ) -> tuple[list[str], int, Cursor | None]:
        """Look at a batch's rows from the last one: their runs' ids are made of them."""
        ids: list[str] = []
        end = first = min(cursor.place, batch.rows) if cursor else batch.rows
        fields = (*_EQUAL, "error", "created")
        at_once = limit
        while first - end < (MOST_ROWS if selected is None else ROWS):
            rows = range(end - 1, max(end - at_once, 0) - 1, -1)
            at_once = min(at_once * 4, ROWS)
            named = [run_id_of(batch.batch_id, row) for row in rows]
            headers = await self._headers(named, fields, note_left_out)
            fitting = {
                run_id
                for run_id, header in zip(named, headers, strict=True)
                if "created" in header and which.matches(header)
            }
            if selected is not None and fitting:
                fitting = await selected([run_id for run_id in named if run_id in fitting])
            for row, run_id in zip(rows, named, strict=True):
                end = row
                if run_id in fitting:
                    ids.append(run_id)
                if len(ids) == limit:
                    break
            if not end or len(ids) == limit:
                break
        return ids, first - end, Cursor(end) if end else None

    async def _headers(
        self, run_ids: Sequence[str], fields: Sequence[str], report: Report | None = None
    ) -> list[Fields]:
        reads = (("HMGET", self._keys.run(run_id), *fields) for run_id in run_ids)
        replies = await self._reads.execute_all(*reads, report=report)
        return [
            {name: value for name, value in zip(fields, reply, strict=True) if value is not None}
            for reply in replies
        ]

    async def summaries(
        self, run_ids: Sequence[str], report: Report | None = None
    ) -> tuple[RunSummary, ...]:
        """Return the runs that are there, as lists show them.

        With `report`, archived ones that cannot be read are left out; it gets why.
        """
        headers = await self._headers(run_ids, _FIELDS, report)
        there = [one for one, header in zip(run_ids, headers, strict=True) if header]
        sizes = await self._reads.execute_all(
            *(("HSTRLEN", self._keys.run(run_id), "slim") for run_id in there)
        )
        small = [one for one, size in zip(there, sizes, strict=True) if size <= LARGEST_STATE]
        states = await self._headers(small, ("slim",))
        slim = {one: state.get("slim", "") for one, state in zip(small, states, strict=True)}
        pairs = zip(run_ids, headers, strict=True)
        return tuple(summary(one, h, slim.get(one, "")) for one, h in pairs if "created" in h)

    async def look(self) -> int:
        """Put the lists of a shard right, drawn anew each time, unless another worker just did.

        Returns how many runs were wrong. Raises `StoreError`.
        """
        lock = ("SET", self._keys.of(keys.TIDIED), "1", "NX", "PX", TIDY_MS)
        if not await self._connection.execute(*lock):
            return 0
        return await self.tidy_shard(random.randrange(self._keys.shards))  # noqa: S311 - no secret

    async def tidy_shard(self, shard: int) -> int:
        """Put the lists of a shard right; return how many runs were wrong in them.

        Runs that have expired leave them here. A list is read on while a fourth of a page is
        wrong, so lists do not grow with runs that are gone.
        """
        return sum([await self._tidy(shard, name) for name in LISTS])

    async def _tidy(self, shard: int, name: str) -> int:
        due, place, moved = [self._keys.due(shard)], self._keys.tidied(shard), 0
        at = await self._connection.execute("HGET", place, name) or "0"
        for _ in range(MOST_TIDIED):
            at, looked, wrong = await run_script(self._connection, "tidy", due, name, at, TIDIED)
            moved += wrong
            if at == "0" or wrong * 4 < looked:
                break
        command = ("HDEL", place, name) if at == "0" else ("HSET", place, name, at)
        await self._connection.execute(*command)
        return moved

    async def tree(self, run_id: str, limit: int) -> RunTree:
        """Return the run with up to `limit` runs below it, those of upper levels first.

        Raises `ConfigurationError` for an unknown run, `StoreError`.
        """
        found = await self.summaries([run_id])
        if not found:
            raise unknown_run(run_id)
        runs = {run_id: found[0]}
        below: dict[str, Sequence[str]] = {}
        left_out: dict[str, int] = {}
        level = [run_id]
        while level:
            following: list[str] = []
            for one in level:
                ids = [child for child in await self._started(runs[one]) if child not in runs]
                taken = ids[: max(limit + 1 - len(runs), 0)]
                summaries = await self.summaries(taken, note_left_out)
                runs |= {child.run_id: child for child in summaries}
                below[one] = [child.run_id for child in summaries]
                left_out[one] = len(ids) - len(taken)
                following += below[one]
            level = following
        return _tree(run_id, runs, below, left_out)

    async def _started(self, run: RunSummary) -> list[str]:
        """Return the runs that calls of a run have started, each once, in the order of calls."""
        key, ids = self._keys.run(run.run_id), []
        for at in range(0, run.steps, STEPS_AT_ONCE):
            numbers = range(at, min(at + STEPS_AT_ONCE, run.steps))
            sizes = await self._reads.execute_all(
                *(("HSTRLEN", f"{key}:log", number) for number in numbers)
            )
            small = [n for n, size in zip(numbers, sizes, strict=True) if 0 < size <= LARGEST_STEP]
            if small:
                stored = await self._reads.execute("HMGET", f"{key}:log", *small)
                ids += await asyncio.to_thread(_runs_in, stored)
        ids += await self._links.started(run.run_id)
        return list(dict.fromkeys(ids))


def summary(run_id: str, header: Fields, slim: str) -> RunSummary:
    """Return a run as lists show it. Pure."""
    state: dict[str, Any] = {}
    if slim:
        try:
            state = exact_json.loads(unpacked_within(LARGEST_STATE, slim), constants=True)
        except (ValueError, SerializationError):  # of another version
            slim = ""
    reason, error = header.get("stop_reason"), header.get("error")
    return RunSummary(
        run_id=run_id,
        agent=header["agent"],
        status=Lifecycle(header["status"]),
        stop_reason=StopReason(reason) if reason else None,
        error=error[:LONGEST_ERROR] if error else None,
        batch_id=header.get("batch") or None,
        line_id=header.get("line") or None,
        tenant=header.get("tenant"),
        parent=header.get("parent") or state.get("parent_agent_id"),
        created=moment(header["created"]),
        updated=moment(header["updated"]),
        ended=moment(header["ended"]) if header.get("ended") else None,
        steps=int(header["step"]),
        max_steps=int(header["max_steps"]) if header.get("max_steps") else None,
        lost_workers=int(header.get("crashes") or 0),
        active_seconds=_of(state, "info", "cumulative_execution_seconds") if slim else None,
        tokens=_of(state, "session_usage", "total_tokens") if slim else None,
        cost_usd=state.get("session_cost_usd", 0.0) if slim else None,
        below_cost_usd=state.get("session_below_cost_usd", 0.0) if slim else None,
        price_estimated=header.get("guessed") == "1",
        usage_estimated=header.get("estimated") == "1",
    )


def _of(state: dict[str, Any], part: str, name: str) -> Any:
    return (state.get(part) or {}).get(name, 0)


def _order(run: Cursor) -> tuple[int, bytes]:
    return run.order


def _runs_in(steps: Sequence[str | None]) -> list[str]:
    """Return the ids of runs in committed steps; none of a step that cannot be read."""
    ids: list[str] = []
    for stored in steps:
        try:
            step = exact_json.loads(
                unpacked_within(LARGEST_STEP * 4, stored or "{}"), constants=True
            )
            calls = step["result"]["tool_calls"]
            ids += [call["run"]["run_id"] for call in calls if call.get("run")]
        except (SerializationError, ValueError, LookupError, TypeError):  # of another version
            continue
    return [one for one in ids if one]


def _tree(
    run_id: str,
    runs: dict[str, RunSummary],
    below: dict[str, Sequence[str]],
    left_out: dict[str, int],
) -> RunTree:
    return RunTree(
        run=runs[run_id],
        below=tuple(_tree(one, runs, below, left_out) for one in below[run_id]),
        left_out=left_out[run_id],
    )
