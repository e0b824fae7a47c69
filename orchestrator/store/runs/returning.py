"""Brings archived runs back to Redis, and removes files of the archive for good."""

import logging
import secrets
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from stepfleet.orchestrator.archive.segments import RunCopy
from stepfleet.orchestrator.errors import ArchiveError, SerializationError
from stepfleet.orchestrator.records.batch import Manifest
from stepfleet.orchestrator.store import keys
from stepfleet.orchestrator.store.archived import ArchiveFile
from stepfleet.orchestrator.store.batches.batches import pages_of
from stepfleet.orchestrator.store.codec import Fields, milliseconds
from stepfleet.orchestrator.store.gateway import Gateway, Opened
from stepfleet.orchestrator.store.lua import flat
from stepfleet.orchestrator.store.pace import SweepPace, in_groups
from stepfleet.orchestrator.store.runs.archive_files import ArchiveFiles

log = logging.getLogger(__name__)
READ_TOGETHER = 50
PAGE = 1_000
EVENTS = 500
FIELDS_BYTES = 1024 * 1024
"""Bytes of a run that is brought back which one command writes, about."""
_BACK_MS = 600_000
"""How long parts of a run stay that nobody puts together."""


class Returning(Gateway):
    """Brings runs of one store back from the archive."""

    def __init__(self, opened: Opened, entries: ArchiveFiles) -> None:
        super().__init__(opened)
        self._due_batches = opened.keys.of(keys.ARCHIVE_BATCHES)
        self._archived, self._entries = opened.reads.archived, entries

    async def restore(self, run_ids: Sequence[str]) -> int:
        """Bring runs back to Redis; return how many were in the archive.

        They are archived anew `archive_after` seconds later. Raises `ArchiveError`,
        `SerializationError` or `ConfigurationError` where a file cannot be read, `StoreError`.
        """
        done, numbers = 0, set[int]()
        for at in range(0, len(run_ids), READ_TOGETHER):
            some = run_ids[at : at + READ_TOGETHER]
            places = await self._archived.where(some)
            async for part in self._archived.parts(places):
                headers = [one.header for one in part.values()]
                await self._due_again({one.get("batch", "") for one in headers} - {""})
                for config in {one["config"] for one in headers}:
                    if not await self._configs.has(config):
                        await self._configs.save(await self._configs.load(config))
                pairs = [(copy, places[run_id].number) for run_id, copy in part.items()]
                done += sum(await in_groups(pairs, lambda pair: self._restore(*pair)))
                numbers |= {number for _, number in pairs}
        for number in numbers:
            # Others may get runs still: see `ArchiveFiles.close_old`.
            if not await self._entries.is_open(number):
                file = await self._archived.file(number, anew=True)
                await self._entries.drop_if_empty(file) if file else None
        return done

    async def restore_batch(self, manifest: Manifest) -> int:
        """Bring the runs of a batch back; return how many. Raises as `restore`."""
        done = 0
        for some in pages_of(manifest.batch_id, manifest.rows, PAGE):
            done += await self.restore(some)
        return done

    async def _due_again(self, batch_ids: Iterable[str]) -> None:
        now = milliseconds(await self._connection.now())
        for one in batch_ids:
            await self._connection.execute("ZADD", self._due_batches, now, one)

    async def _restore(self, copy: RunCopy, number: int) -> int:
        run_key, suffix = self._keys.run(copy.run_id), f":back:{secrets.token_hex(4)}"
        for part, fields in copy.hashes.items():
            back = f"{run_key}{part}{suffix}"
            for some in _chunks(fields):
                await self._write_back(back, [("HSET", back, *flat(some))])
        back = f"{run_key}:events{suffix}"
        for at in range(0, len(copy.events), EVENTS):
            some_events = copy.events[at : at + EVENTS]
            await self._write_back(
                back, [("XADD", back, place, *flat(one)) for place, one in some_events]
            )
        parts = [part.removeprefix(":") or "header" for part in copy.hashes]
        names = " ".join([*parts, *(["events"] if copy.events else [])])
        return int(await self._scripts.run("restore", copy.run_id, number, names, suffix))

    async def _write_back(self, key: str, calls: Sequence[tuple[Any, ...]]) -> None:
        await self._connection.execute_all(*calls, ("PEXPIRE", key, _BACK_MS))

    async def purge(self, batch: Manifest | None, before: int, *, dry_run: bool) -> int:
        """Remove files that were written before a time (ms), or of a batch; return their runs.

        A file goes as a whole, with all its runs that are there alone. A damaged one goes with its
        batch only: which runs it has is known then. Raises `ArchiveError`.
        """
        done, batch_id = 0, batch.batch_id if batch else None
        async for file in self._archived.files():
            if file.is_whole and file.at <= before and batch_id in (None, file.batch_id):
                done += await self._purge(file, batch, dry_run=dry_run)
        return done

    async def _purge(self, file: ArchiveFile, batch: Manifest | None, *, dry_run: bool) -> int:
        try:
            among = pages_of(batch.batch_id, batch.rows, PAGE) if batch else None
            pages = [page async for page in self._archived.runs(file, among)]
        except (ArchiveError, SerializationError) as error:
            if isinstance(error, ArchiveError) and not error.is_missing:
                raise
            log.warning("the archive's file %s stays: %s", file.name, error)
            return 0
        done, number = sum(map(len, pages)), str(file.number)
        if not dry_run:
            pace = SweepPace(self._connection)
            for group in (some for page in pages for some in pace.groups(page)):
                await pace.send([self._scripts.call("restore", one, number, "") for one in group])
            await self._entries.drop(file)
        return done


def _chunks(fields: Fields) -> Iterator[Fields]:
    """Yield fields in parts of about `FIELDS_BYTES`."""
    part, size = Fields(), 0
    for name, value in fields.items():
        if part and size + len(value) > FIELDS_BYTES:
            yield part
            part, size = {}, 0
        part[name] = value
        size += len(value) + len(name)
    if part:
        yield part
