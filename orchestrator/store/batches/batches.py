"""Batches in Redis: manifests, counters, and which runs have ended. Knows no input files."""

import hashlib
import logging
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from uuid import UUID, uuid5

from pydantic import ValidationError

from stepfleet.orchestrator.errors import ConfigurationError, NotFoundError, SerializationError
from stepfleet.orchestrator.records.batch import BatchProgress, Manifest, progress_of
from stepfleet.orchestrator.records.state import Lifecycle
from stepfleet.orchestrator.records.text.validation import explain_invalid
from stepfleet.orchestrator.store import keys
from stepfleet.orchestrator.store.archived import note_left_out
from stepfleet.orchestrator.store.codec import moment
from stepfleet.orchestrator.store.gateway import Gateway, Opened
from stepfleet.orchestrator.store.lua import flat

MOST_TIDIED = 5
log = logging.getLogger(__name__)

ROWS = 2_000
"""Rows whose runs are looked at together."""
TOGETHER = 25
"""Batches that are read together: with their shards some hundred short hashes."""
Place = tuple[int, str]
"""Where a batch is in the list of all: its time of creation in ms, and its id."""
_NAMESPACE = UUID("6d0f3d0e-6f2c-5a0b-9c8e-0c6a6f7b1c55")


def _manifest(batch_id: str, fields: Mapping[str, str]) -> Manifest:
    try:
        return Manifest.from_fields(batch_id, fields)
    except ValidationError as error:
        why = explain_invalid(error)
        msg = f"batch {batch_id} cannot be read ({why}): upgrade this worker or client"
        raise SerializationError(msg) from error


def run_id_for(key: str) -> str:
    """Return the id of the single run with that idempotency key."""
    return str(uuid5(_NAMESPACE, f"run:{key}"))


def batch_id_of(key: str) -> str:
    """Return the id of the batch with that key: the same key is the same batch."""
    return str(uuid5(_NAMESPACE, key))


def id_of_keyed_batch(idempotency_key: str) -> str:
    """Return the id of the batch with a key that its submitter gave."""
    return batch_id_of(f"key:{idempotency_key}")


def limit_name(batch_id: str) -> str:
    """Return the name of the limit that a batch has to itself."""
    return f"batch:{batch_id}"


def run_id_of(batch_id: str, row: int) -> str:
    """Return the id of a batch's run: no order of runs needs to be stored.

    A UUID of version 5 (RFC 9562, 5.5), as `uuid5` makes it in three times the time.
    """
    name = _namespace(batch_id) + b"%d" % row
    digest = bytearray(hashlib.sha1(name, usedforsecurity=False).digest()[:16])
    digest[6] = digest[6] & 0x0F | 0x50
    digest[8] = digest[8] & 0x3F | 0x80
    text = digest.hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def pages_of(batch_id: str, rows: int, size: int) -> Iterator[list[str]]:
    """Yield the ids of a batch's runs in the order of its rows, up to `size` at a time."""
    for first in range(0, rows, size):
        yield [run_id_of(batch_id, row) for row in range(first, min(first + size, rows))]


@lru_cache(maxsize=64)
def _namespace(batch_id: str) -> bytes:
    return UUID(batch_id).bytes


@dataclass(frozen=True, slots=True)
class EndedPage:
    """Runs that ended in one shard, in that order, and the place to go on from."""

    shard: int
    run_ids: tuple[str, ...]
    place: int


class Batches(Gateway):
    """Reads and writes the records of whole batches."""

    def __init__(self, opened: Opened) -> None:
        super().__init__(opened)
        self._shards = range(opened.keys.shards)
        self._all, self._sweeps = opened.keys.of(keys.BATCHES), opened.keys.of(keys.SWEEPS)
        self._retention = timedelta(seconds=opened.settings.retention)

    async def find(self, batch_id: str) -> Manifest | None:
        """Return a batch's manifest; None if there is none of that id.

        Raises `SerializationError` for one that only a newer version can read.
        """
        fields = await self._connection.execute("HGETALL", self._keys.manifest(batch_id))
        # A heartbeat that a submitter sends after a purge makes no batch.
        return _manifest(batch_id, fields) if "created" in fields else None

    async def _readable(self, batch_id: str) -> Manifest | None:
        """Return a batch's manifest as far as there is one that this version can read."""
        try:
            return await self.find(batch_id)
        except SerializationError:
            return None

    async def get(self, batch_id: str) -> Manifest:
        """Return a batch's manifest. Raises `NotFoundError` if there is none of that id."""
        manifest = await self.find(batch_id)
        if manifest is None:
            msg = f"no batch has the id {batch_id!r}; 'stepfleet status' lists the batches"
            raise NotFoundError(msg)
        return manifest

    async def register(self, manifest: Manifest) -> None:
        """Store a manifest that is not sealed. Doing it again changes nothing."""
        key = self._keys.manifest(manifest.batch_id)
        created = round(manifest.created.timestamp() * 1000)
        await self._connection.execute("HSETNX", key, "created", created)
        await self._connection.execute("HSET", key, *flat(manifest.to_fields()))
        await self._connection.execute("ZADD", self._all, "NX", created, manifest.batch_id)

    async def newest_of(self, path: str, name: str, agents: Collection[str]) -> Manifest | None:
        """Return the newest batch of a path (without one, of a name) with one of the agents."""
        for batch_id in await self._connection.execute("ZREVRANGE", self._all, 0, -1):
            found = await self._readable(batch_id)
            same = found and (found.path == path if path else found.name == name)
            if found and same and not set(agents).isdisjoint(found.agent.split(", ")):
                return found
        return None

    async def extend(self, manifest: Manifest, rows: int, total: int, agent: str) -> Manifest:
        """Open a batch for `rows` more rows, not sealed, and return it.

        Raises `ConfigurationError` where another command has added rows meanwhile.
        """
        key, batch_id = self._keys.manifest(manifest.batch_id), manifest.batch_id
        opened = await self._connection.execute("HDEL", key, "sealed")
        now = await self.find(batch_id)
        if opened != int(manifest.sealed) or now is None or now.rows != manifest.rows:
            if opened:
                await self.seal(batch_id)
            msg = f"another command adds rows to batch {batch_id}; repeat this one when it is done"
            raise ConfigurationError(msg)
        changes = {"rows": manifest.rows + rows, "total": total, "agent": agent}
        await self.submitting(batch_id)
        await self._connection.execute("HSET", key, *flat(changes))
        return now.model_copy(update={**changes, "sealed": False})

    async def rows(self, run_ids: Sequence[str]) -> list[tuple[str, str | None]]:
        """Return the line id of each run that is there and, where it is empty, the run's input."""
        reads = (("HMGET", self._keys.run(run_id), "status", "line") for run_id in run_ids)
        found = await self._reads.execute_all(*reads)
        there = [
            (run_id, line or "")
            for run_id, (status, line) in zip(run_ids, found, strict=True)
            if status
        ]
        without = [run_id for run_id, line in there if not line]
        inputs = (("HGET", f"{self._keys.run(run_id)}:log", "input:0") for run_id in without)
        given = dict(zip(without, await self._reads.execute_all(*inputs), strict=True))
        return [(line, given.get(run_id)) for run_id, line in there]

    async def seal(self, batch_id: str) -> None:
        """Note that every run of the batch was created."""
        await self._connection.execute("HSET", self._keys.manifest(batch_id), "sealed", 1)
        await self.look_at(batch_id)

    async def submitting(self, batch_id: str) -> None:
        """Note that the batch's submitter is alive."""
        now = (await self.now()).timestamp()
        await self._connection.execute(
            "HSET", self._keys.manifest(batch_id), "submitting", f"{now:.3f}"
        )

    async def look_at(self, batch_id: str) -> None:
        """Have workers check soon whether the whole batch has ended."""
        await self._connection.execute("ZADD", self._keys.over(0), 0, batch_id)

    async def progress(self, manifest: Manifest) -> BatchProgress:
        """Return the sum of all shards' counters."""
        # The manifest is read first: a sealed batch gets no more runs. It may be gone by now.
        manifest = await self.find(manifest.batch_id) or manifest
        counters = await self.counters(manifest.batch_id)
        return progress_of(manifest, counters, await self.now())

    async def newest(self, limit: int) -> list[BatchProgress]:
        """Return the newest batches; forget those whose runs are past their retention."""
        return (await self.page(limit))[0]

    async def page(
        self, limit: int, after: Place | None = None
    ) -> tuple[list[BatchProgress], Place | None]:
        """Return up to `limit` batches, the newest first, and the place of the last one, if any.

        They come after the place `after`. Those that are past their retention are forgotten.
        """
        execute = self._connection.execute
        first = 0
        if after is not None:
            rank = await execute("ZREVRANK", self._all, after[1])
            if rank is None:  # it is gone
                rank = await execute("ZCOUNT", self._all, f"({after[0]}", "+inf") - 1
            first = rank + 1
        flat = await execute("ZREVRANGE", self._all, first, first + limit, "WITHSCORES")
        places = [(int(float(at)), one) for one, at in zip(flat[::2], flat[1::2], strict=True)]
        found = []
        for at in range(0, min(len(places), limit), TOGETHER):
            ids = [one for _, one in places[at : min(at + TOGETHER, limit)]]
            found += await self._progress_of(ids)
        return found, places[limit - 1] if len(places) > limit else None

    async def _progress_of(self, ids: Sequence[str]) -> list[BatchProgress]:
        fields = await self._connection.execute_all(
            *(("HGETALL", self._keys.manifest(one)) for one in ids)
        )
        counters = await self._connection.execute_all(
            *(("HGETALL", self._keys.batch(n, one)) for one in ids for n in self._shards)
        )
        now, shards, found = await self.now(), len(self._shards), []
        for n, (batch_id, stored) in enumerate(zip(ids, fields, strict=True)):
            own = counters[n * shards : (n + 1) * shards]
            if "created" not in stored:
                await self._connection.execute("ZREM", self._all, batch_id)
                continue
            try:
                manifest = _manifest(batch_id, stored)
            except SerializationError as error:
                log.warning("%s", error)
                continue
            if await self._is_past(manifest, own):
                await self.forget(batch_id)
            else:
                found.append(progress_of(manifest, own, now))
        return found

    async def tidy(self) -> None:
        """Forget some batches, if there are any, whose runs are past their retention.

        A few, drawn from all that are old enough, at the registration of each batch: so manifests
        do not pile up where nobody lists them.
        """
        before = (await self.now() - self._retention).timestamp() * 1000
        old = int(await self._connection.execute("ZCOUNT", self._all, "-inf", before))
        if not old:
            return
        first = random.randrange(max(old - MOST_TIDIED, 0) + 1)  # noqa: S311 - no secret
        found = await self._connection.execute(
            "ZRANGEBYSCORE", self._all, "-inf", before, "LIMIT", first, MOST_TIDIED
        )
        for batch_id in found:
            try:
                manifest = await self.find(batch_id)
            except SerializationError:
                continue
            if not manifest or await self._is_past(manifest, await self.counters(batch_id)):
                await self.forget(batch_id)

    async def forget(self, batch_id: str) -> None:
        """Remove a batch's manifest; its runs and counters stay as long as they stay."""
        await self._connection.execute("ZREM", self._all, batch_id)
        await self._connection.execute("DEL", self._keys.manifest(batch_id))
        await self._connection.execute("ZREM", self._sweeps, batch_id)
        limits = self._keys.of(keys.LIMIT_SETTINGS)
        await self._connection.execute("HDEL", limits, limit_name(batch_id))
        await self.unflag(batch_id)

    async def unflag(self, batch_id: str) -> None:
        """Remove the requests to a batch that is gone from all shards."""
        names = [f"{part}:{batch_id}" for part in "boxd"]
        await self._connection.execute_all(
            *(("HDEL", self._keys.flags(shard), *names) for shard in self._shards)
        )

    async def has_runs(self, batch_id: str) -> bool:
        """Return whether any shard still counts runs of the batch."""
        return any(await self.counters(batch_id))

    async def open_runs(self, batch_id: str) -> int:
        """Return how many runs have been created and not ended."""
        reads = (("HGET", self._keys.batch(shard, batch_id), "open") for shard in self._shards)
        return sum(int(value or 0) for value in await self._connection.execute_all(*reads))

    async def is_over(self, batch_id: str, manifest: Manifest | None) -> bool:
        """Return whether no run of a batch is open, and none will be created."""
        is_whole = manifest is None or manifest.sealed or manifest.cancel_requested
        return is_whole and not await self.open_runs(batch_id)

    async def ended_after(
        self, batch_id: str, places: Mapping[int, int], limit: int
    ) -> list[EndedPage]:
        """Return up to `limit` runs per shard that ended after its place in `places`."""
        last = ("+inf", "WITHSCORES", "LIMIT", 0, limit)
        reads = (
            ("ZRANGEBYSCORE", self._keys.ended(shard, batch_id), f"({places.get(shard, 0)}", *last)
            for shard in self._shards
        )
        replies = await self._connection.execute_all(*reads)
        return [
            EndedPage(shard, tuple(flat[::2]), int(float(flat[-1])))
            for shard, flat in zip(self._shards, replies, strict=True)
            if flat
        ]

    async def statuses(self, run_ids: Sequence[str]) -> list[Lifecycle | None]:
        """Return the runs' statuses; None for a run that is not there (yet, or any more)."""
        reads = (("HGET", self._keys.run(run_id), "status") for run_id in run_ids)
        replies = await self._reads.execute_all(*reads)
        return [Lifecycle(reply) if reply else None for reply in replies]

    async def in_states(self, run_ids: Sequence[str], wanted: Collection[Lifecycle]) -> list[str]:
        """Return those of the runs that are in one of the states."""
        pairs = zip(run_ids, await self.statuses(run_ids), strict=True)
        return [run_id for run_id, status in pairs if status in wanted]

    async def ensure_runs(self, run_ids: Sequence[str]) -> None:
        """Raise `NotFoundError` for a run that is to end before others, and is not there."""
        for run_id, status in zip(run_ids, await self.statuses(run_ids), strict=True):
            if status is None:
                msg = f"field 'after': no run has the id {run_id!r}; ended runs are removed after"
                raise NotFoundError(f"{msg} the retention time, unless they are archived")

    async def ends(self, run_ids: Sequence[str]) -> list[datetime | None]:
        """Return when the runs ended; None for a run that is open, or is not there."""
        reads = (("HGET", self._keys.run(run_id), "ended") for run_id in run_ids)
        replies = await self._reads.execute_all(*reads)
        return [moment(reply) if reply else None for reply in replies]

    async def run_of_line(self, manifest: Manifest, line_id: str) -> str | None:
        """Return the run of the line with that id; None if the batch has none (any more)."""
        for run_ids in pages_of(manifest.batch_id, manifest.rows, ROWS):
            reads = (("HGET", self._keys.run(run_id), "line") for run_id in run_ids)
            lines = await self._reads.execute_all(*reads, report=note_left_out)
            if line_id in lines:
                return run_ids[lines.index(line_id)]
        return None

    async def counters(self, batch_id: str) -> list[dict[str, str]]:
        """Return each shard's counters of a batch."""
        reads = (("HGETALL", self._keys.batch(shard, batch_id)) for shard in self._shards)
        return await self._connection.execute_all(*reads)

    async def now(self) -> datetime:
        """Return Redis's time."""
        return await self._connection.now()

    async def is_forgettable(self, manifest: Manifest) -> bool:
        """Tell whether a batch and its runs are past retention."""
        return await self._is_past(manifest, await self.counters(manifest.batch_id))

    async def _is_past(self, manifest: Manifest, counters: list[dict[str, str]]) -> bool:
        """Return whether nothing is left; an ended batch is kept for one more retention time."""
        since = manifest.expires or manifest.created
        past = await self.now() - since > self._retention
        # One that waits for the end of another batch has no runs, and stays.
        is_whole = manifest.total > 0 or manifest.refused is not None or manifest.cancel_requested
        return past and is_whole and not any(counters)
