"""Moves ended runs from Redis to the archive. One process of a fleet at a time does it.

A file is written, read back, compared and entered; then its runs go from Redis, each in one step
that checks that it is still as it was copied. Where a process dies in between, the file has runs
that Redis has too: those are moved again, to another file, and reads take what Redis has. A file
that was not entered as a whole is removed an hour later; a process that sleeps in the midst of its
work, and goes on when the turn is another's, finds by Redis's clock that it is too late.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from itertools import chain
from typing import Any

from stepfleet.orchestrator.archive.places import shown_url
from stepfleet.orchestrator.archive.segments import (
    SUFFIX,
    Segment,
    build,
    read_all,
)
from stepfleet.orchestrator.errors import (
    AgentException,
    ArchiveError,
    ConflictError,
    SerializationError,
)
from stepfleet.orchestrator.records.archive import Archived, ArchiveFigures
from stepfleet.orchestrator.records.outcome import StopReason
from stepfleet.orchestrator.store import keys
from stepfleet.orchestrator.store.archived import LOOK_SECONDS, ArchiveFile
from stepfleet.orchestrator.store.batches.batches import Batches, pages_of
from stepfleet.orchestrator.store.batches.upkeep import BatchUpkeep
from stepfleet.orchestrator.store.codec import milliseconds, moment
from stepfleet.orchestrator.store.gateway import Opened, TurnGateway
from stepfleet.orchestrator.store.pace import SweepPace
from stepfleet.orchestrator.store.runs.archive_files import ENTER_MS, ArchiveFiles
from stepfleet.orchestrator.store.runs.copying import (
    READ_BYTES,
    CopiedRun,
    RunCopying,
    RunLook,
    within,
)

log = logging.getLogger(__name__)
TURN_MS, HOLDS = 15_000, 5
"""How long others leave the work to a process that is silent, and how often it speaks in that."""
BY_HAND_SECONDS, TURN_LOOK_SECONDS = 20.0, 0.1
"""For how long, and how often, who moves runs by hand looks for the end of another's turn."""
GATHER_MS = 6 * 3_600_000
"""How often all ended runs are looked at: processes without the setting enter none."""
GATHERED = 200
"""Runs whose ends are looked at together: some milliseconds of the process's loop."""
RUNS = 1_000
"""Runs of a file, at most."""
BYTES = 8 * 1024 * 1024
"""Bytes of runs, in JSON, from which on a file gets no more."""
LEAST = 200
"""Runs for which a file is worth while, unless the oldest of them waits for `PATIENCE_MS`."""
PATIENCE_MS = 3_600_000
BATCHES = 100
"""Batches that are moved in one turn."""
MOST_DUE = 20_000
"""Runs without a batch that are moved in one turn, about."""
LATER_MS = 600_000
"""When runs are looked at again that could not go, since others are to learn of their ends."""


class Archiving(TurnGateway):
    """Moves runs of one store to the archive that its settings name."""

    def __init__(
        self, opened: Opened, batches: Batches, upkeep: BatchUpkeep, entries: ArchiveFiles
    ) -> None:
        turn = opened.keys.of(keys.ARCHIVE_TURN)
        super().__init__(opened, TURN_MS, lambda _: turn)
        self._all_batches = opened.keys.of(keys.BATCHES)
        names = (keys.ARCHIVE_ORDER, keys.ARCHIVE_BATCHES, keys.ARCHIVE_STATE)
        self._order, self._due_batches, self._state = map(opened.keys.of, names)
        self._archived = opened.reads.archived
        self._copying = RunCopying(opened.connection, opened.keys)
        self._batches, self._upkeep, self._entries = batches, upkeep, entries

    # ---------------------------------------------------------------------------------- moving

    async def look(self) -> Archived:
        """Move what is due, unless another process is at it, and note how it went.

        Raises `ArchiveError` or `ConfigurationError` where the archive cannot be used: everything
        stays in Redis. Raises `StoreError`.
        """
        if not await self.take(""):
            return Archived()
        async with self._held_turn():
            try:
                moved = await self.move_due(self._settings.archive_after)
            except AgentException as error:
                await self._note_failure(error)
                raise
            await self._connection.execute("HDEL", self._state, "error", "since")
            return moved

    @asynccontextmanager
    async def _held_turn(self) -> AsyncIterator[None]:
        """Hold the turn that was taken, and give it back."""

        async def hold() -> None:
            while True:
                await asyncio.sleep(TURN_MS / 1000 / HOLDS)
                with suppress(AgentException):
                    await self.hold("")

        holding = asyncio.create_task(hold())
        try:
            yield
        finally:
            holding.cancel()
            with suppress(AgentException):
                await self.release("")

    async def run(self, after: float, report: Callable[[Archived], None]) -> Archived:
        """Move all that ended `after` seconds ago, now; `report` gets what was moved by then.

        Raises `ConflictError` where another process is at it for long, and as `look`.
        """
        self._archived.place()  # a wrong setting is told before anything is done
        async with self._turn_by_hand():
            await self.gather()
            await self._wait_until_known()
            done = Archived()

            def note(some: Archived) -> None:
                nonlocal done
                done += some
                report(done)

            while (await self.move_due(after, least=1, report=note)).runs:
                pass
            await self._connection.execute("HDEL", self._state, "error", "since")
            return done

    async def _wait_until_known(self) -> None:
        """Wait until all clients know that there is an archive: before that nothing is moved."""
        gathered = int(await self._connection.execute("HGET", self._state, "gathered"))
        now = milliseconds(await self._connection.now())
        await asyncio.sleep(max(0.0, (gathered - now) / 1000 + 2 * LOOK_SECONDS + 0.001))

    async def due(self, after: float) -> Archived:
        """Return what `run` would move, without moving it: its runs. Raises as `run`."""
        self._archived.place()
        async with self._turn_by_hand():
            await self.gather()
        before = milliseconds(await self._connection.now()) - round(after * 1000)
        shards = [self._keys.aging(shard) for shard in range(self._keys.shards)]
        counts = await self._connection.execute_all(
            *(("ZCOUNT", key, "-inf", before) for key in shards)
        )
        runs, given = sum(map(int, counts)), ("-inf", before)
        for batch_id in await self._connection.execute("ZRANGEBYSCORE", self._due_batches, *given):
            if manifest := await self._batches.find(batch_id):
                for some in pages_of(batch_id, manifest.rows, RUNS):
                    looks = (("EXISTS", self._keys.run(one)) for one in some)
                    runs += sum(await self._connection.execute_all(*looks))
        return Archived(runs=runs)

    @asynccontextmanager
    async def _turn_by_hand(self) -> AsyncIterator[None]:
        """Have the turn; another's is waited for. Raises `ConflictError` where that takes long."""
        until = time.monotonic() + BY_HAND_SECONDS
        while not await self.take(""):
            if time.monotonic() > until:
                msg = "another process moves runs to the archive now; repeat this when it has ended"
                raise ConflictError(msg)
            await asyncio.sleep(TURN_LOOK_SECONDS)
        async with self._held_turn():
            yield

    async def figures(self) -> ArchiveFigures:
        """Return how full the archive is, what is due, and what is wrong. Raises `StoreError`."""
        now = milliseconds(await self._connection.now())
        before = now - round(self._settings.archive_after * 1000)
        shards = [self._keys.aging(shard) for shard in range(self._keys.shards)]
        lists = [*shards, self._due_batches]
        found = await self._connection.execute_all(
            ("ZCARD", self._order),
            ("HGETALL", self._state),
            *(("ZCOUNT", key, "-inf", before) for key in lists),
            *(("ZRANGE", key, 0, 0, "WITHSCORES") for key in lists),
        )
        files, state, *found = found
        *due, batches = map(int, found[: len(lists)])
        firsts = [float(one[1]) for one in found[len(lists) :] if one]
        since, url = state.get("since"), self._settings.archive_url
        return ArchiveFigures(
            url=shown_url(url.get_secret_value()) if url else None,
            runs=int(state.get("runs", 0)),
            bytes=int(state.get("bytes", 0)),
            files=int(files),
            due_runs=sum(due),
            due_batches=batches,
            overdue_seconds=max(0.0, before - min(firsts, default=before)) / 1000,
            error=state.get("error"),
            failing_since=moment(since) if since else None,
            failing_seconds=max(0.001, (now - int(since)) / 1000) if since else 0.0,
        )

    async def _note_failure(self, error: AgentException) -> None:
        since = milliseconds(await self._connection.now())
        with suppress(AgentException):
            await self._entries.note(
                ("HSETNX", self._state, "since", since),
                ("HSET", self._state, "error", error.message[:500]),
            )

    async def move_due(
        self,
        after: float,
        *,
        least: int = LEAST,
        report: Callable[[Archived], None] = lambda _: None,
    ) -> Archived:
        """Move runs and batches that ended `after` seconds ago; the caller has the turn.

        Fewer than `least` runs without a batch wait for others, for up to an hour. `report` gets
        what each part has moved.
        """
        await self._entries.close_old()
        gathered = await self._connection.execute("HGET", self._state, "gathered")
        now = milliseconds(await self._connection.now())
        looked = await self._connection.execute("HGET", self._state, "looked")
        if not gathered or int(looked or 0) < now - GATHER_MS:
            await self.gather()
            now = milliseconds(await self._connection.now())
        before, done = now - round(after * 1000), Archived()
        if not gathered or int(gathered) > now - 2000 * LOOK_SECONDS:
            return done  # all clients are to know first that there is an archive
        async for part in self._aged(before, least):
            done += (moved := await self._move(part, None))
            report(moved)
        for batch_id in await self._connection.execute(
            "ZRANGEBYSCORE", self._due_batches, "-inf", before, "LIMIT", 0, BATCHES
        ):
            try:
                done += await self.move_batch(batch_id, report)
            except SerializationError as error:  # of a newer version
                log.warning("batch %s is not archived: %s", batch_id, error)
                await self._put_off_batch(batch_id)
        return done

    async def gather(self) -> None:
        """Enter runs and batches that ended without being entered, as before there was an archive.

        Looks at all ended runs of the store.
        """
        for shard in range(self._keys.shards):
            for reason in StopReason:
                await self._gather_list(shard, f"{self._keys.tag(shard)}runs:{reason}")
        for batch_id in await self._connection.execute("ZRANGE", self._all_batches, 0, -1):
            await self._gather_batch(batch_id)
        now = milliseconds(await self._connection.now())
        await self._entries.note(
            ("HSETNX", self._state, "gathered", now), ("HSET", self._state, "looked", now)
        )

    async def _gather_list(self, shard: int, name: str) -> None:
        aging, place = self._keys.aging(shard), 0
        while run_ids := await self._connection.execute(
            "ZRANGE", name, place, place + GATHERED - 1
        ):
            reads = (("HMGET", self._keys.run(one), "batch", "ended") for one in run_ids)
            found = await self._connection.execute_all(*reads)
            pairs = zip(run_ids, found, strict=True)
            ends = {one: ended for one, (batch, ended) in pairs if ended and not batch}
            if ends:
                both = ((ended, one) for one, ended in ends.items())
                entry = ("ZADD", aging, "NX", *chain.from_iterable(both))
                await self._entries.note(entry, of=self._keys.run(run_ids[0]))
            place += GATHERED

    async def _gather_batch(self, batch_id: str) -> None:
        try:
            manifest = await self._batches.find(batch_id)
        except SerializationError:
            return  # of a newer version
        if manifest and not manifest.archived and await self._batches.is_over(batch_id, manifest):
            kept = timedelta(seconds=self._settings.retention)
            ended = manifest.expires - kept if manifest.expires else await self._connection.now()
            at = milliseconds(ended)
            await self._entries.note(("ZADD", self._due_batches, "NX", at, batch_id))

    async def _aged(self, before: int, least: int) -> AsyncIterator[list[str]]:
        """Yield runs without a batch that ended before a time (ms), the runs of a file together.

        They are in the order of their ends over all shards: lists go through times, and open the
        fewer files the shorter the time is that each of them has.
        """
        limits = ("WITHSCORES", "LIMIT", 0, MOST_DUE // self._keys.shards + 1)
        shards = [self._keys.aging(shard) for shard in range(self._keys.shards)]
        found = await self._connection.execute_all(
            *(("ZRANGEBYSCORE", key, "-inf", before, *limits) for key in shards)
        )
        ends = sorted(
            (float(at), one)
            for flat in found
            for one, at in zip(flat[::2], flat[1::2], strict=True)
        )
        for at in range(0, len(ends), RUNS):
            some = ends[at : at + RUNS]
            if len(some) >= least or some[0][0] < before - PATIENCE_MS:
                yield [one for _, one in some]

    async def move_batch(
        self, batch_id: str, report: Callable[[Archived], None] = lambda _: None
    ) -> Archived:
        """Move the runs of a batch that is over; the caller has the turn."""
        entered = await self._connection.execute("ZSCORE", self._due_batches, batch_id)
        manifest = await self._batches.find(batch_id)
        if manifest is None or not await self._batches.is_over(batch_id, manifest):
            # At its next end it is due again.
            await self._connection.execute("ZREM", self._due_batches, batch_id)
            return Archived()
        await self._upkeep.keep(batch_id)
        key = self._keys.manifest(batch_id)
        await self._entries.note(("HSET", key, "archived", "1"), of=key)
        done = Archived()
        for some in pages_of(batch_id, manifest.rows, RUNS):
            done += (moved := await self._move(some, batch_id))
            report(moved)
        if done.left:
            await self._put_off_batch(batch_id)
        elif entered == await self._connection.execute("ZSCORE", self._due_batches, batch_id):
            await self._connection.execute("ZREM", self._due_batches, batch_id)
        return done  # one that has ended anew meanwhile is due again

    async def _put_off_batch(self, batch_id: str) -> None:
        later = milliseconds(await self._connection.now()) + LATER_MS
        await self._entries.note(("ZADD", self._due_batches, "XX", later, batch_id))

    async def _move(self, run_ids: Sequence[str], batch_id: str | None) -> Archived:
        """Move those of the runs that have ended, in as many files as they need."""
        done, part, size = Archived(), list[CopiedRun](), 0
        pace = SweepPace(self._connection)
        for group in pace.groups(run_ids):
            replies = await pace.send([self._ask(one) for one in group])
            pairs = list(zip(group, replies, strict=True))
            owing = [one for one, reply in pairs if reply[0] < 0]
            await self._put_off(owing)
            done += Archived(left=len(owing))
            looks = [RunLook(one, *reply[1:]) for one, reply in pairs if reply[0] > 0]
            for some in within(READ_BYTES, looks):
                copies, stay = await self._copying.copies(some)
                await self._put_off(stay)
                done += Archived(left=len(stay))
                part += copies
                size += sum(one.size for one in copies)
                if size >= BYTES or len(part) >= RUNS:
                    done += await self._write(part, batch_id)
                    part, size = [], 0
        return done + await self._write(part, batch_id) if part else done

    async def _put_off(self, run_ids: Sequence[str]) -> None:
        later = milliseconds(await self._connection.now()) + LATER_MS
        for run_id in run_ids:
            aging = self._keys.aging(self._keys.shard_of(run_id))
            entry = ("ZADD", aging, "XX", later, run_id)
            await self._entries.note(entry, of=self._keys.run(run_id))

    def _ask(
        self, run_id: str, number: str = "", state: str = "", until: int = 0
    ) -> tuple[Any, ...]:
        return self._scripts.call("archive", run_id, number, state, until)

    async def _write(self, runs: Sequence[CopiedRun], batch_id: str | None) -> Archived:
        """Write a file with these runs, and remove them from Redis."""
        place = self._archived.place()
        await self._entries.check_place(place)
        configs = await self._configs_of(runs)
        pairs = [(one.copy, one.listed) for one in runs]
        segment = await asyncio.to_thread(build, pairs, configs)
        now = await self._connection.now()
        number = await self._entries.new_number()
        name = f"{now:%Y%m%dT%H%M%S}-{number}-{secrets.token_hex(4)}{SUFFIX}"
        file = ArchiveFile(
            number=number, name=name, url=place.url, at=milliseconds(now), batch_id=batch_id
        )
        await self._entries.enter(file)
        self._crash("archive-begun")
        await place.write(name, segment.data)
        self._crash("archive-written")
        await self._verify(file, segment, runs)
        times = [one.created for one in runs]
        whole = file.model_copy(
            update={
                "runs": len(runs),
                "oldest": min(times),
                "newest": max(times),
                "size": len(segment.data),
                "index_at": segment.index_at,
                "index_bytes": segment.index_bytes,
                "is_whole": True,
            }
        )
        await self._entries.enter(whole)
        self._crash("archive-entered")
        return await self._remove(runs, whole)

    async def _remove(self, runs: Sequence[CopiedRun], file: ArchiveFile) -> Archived:
        pace, gone = SweepPace(self._connection), 0
        for group in pace.groups(runs):
            until = file.at + ENTER_MS
            calls = [
                self._ask(one.copy.run_id, str(file.number), one.state, until) for one in group
            ]
            gone += sum(reply[0] == 1 for reply in await pace.send(calls))
            self._crash("archive-removing")
        if not gone:  # all went on meanwhile
            await self._entries.drop(file)
        else:
            await self._entries.note(
                ("HINCRBY", self._state, "runs", gone),
                ("HINCRBY", self._state, "bytes", file.size),
            )
        size = file.size if gone else 0
        return Archived(runs=gone, files=int(gone > 0), bytes=size, left=len(runs) - gone)

    async def _configs_of(self, runs: Sequence[CopiedRun]) -> dict[str, str]:
        digests = {one.config for one in runs}
        texts = {one: await self._configs.text(one) for one in digests}
        return {digest: text for digest, text in texts.items() if text is not None}

    async def _verify(self, file: ArchiveFile, segment: Segment, runs: Sequence[CopiedRun]) -> None:
        """Read a file back. Raises `ArchiveError` where it is not what was written."""
        data = await self._archived.place(file.url).read(file.name)
        try:
            same = await asyncio.to_thread(_is_same, data, segment, runs)
        except SerializationError as error:
            raise ArchiveError(
                f"{file.name} in {file.url} was written, but: {error.message}"
            ) from None
        if not same:
            msg = f"{file.name} in {file.url} was written, and reads otherwise; nothing is removed"
            raise ArchiveError(msg)


def _is_same(data: bytes, segment: Segment, runs: Sequence[CopiedRun]) -> bool:
    """Return whether a file has these runs and no others. Raises `SerializationError`."""
    index, found = read_all(data)
    same = all(found.get(one.copy.run_id) == one.copy for one in runs)
    return same and index == segment.index and data == segment.data
