"""Reads the whole archive back: finds files that are missing or damaged, and their runs."""

import asyncio
from collections.abc import Callable

from stepfleet.orchestrator.archive.segments import read_all
from stepfleet.orchestrator.errors import ArchiveError, SerializationError
from stepfleet.orchestrator.records.archive import ArchiveDamage, ArchiveVerification
from stepfleet.orchestrator.store import keys
from stepfleet.orchestrator.store.archived import ArchiveFile
from stepfleet.orchestrator.store.gateway import Opened

PAGE = 1_000
SUFFIXES = 256
"""Hashes of a shard in which archived runs are; see `Keys.archived`."""
MOST_NAMED = 100
"""Damaged files whose runs are named: a file has up to a thousand."""


async def verified(opened: Opened, report: Callable[[int], None]) -> ArchiveVerification:
    """Read each file of the archive, one at a time; `report` gets how many were read by then.

    Raises `ArchiveError` or `ConfigurationError` where the archive cannot be used as a whole.
    """
    archived, entered = opened.reads.archived, opened.keys.of(keys.ARCHIVE_FILES)
    damaged: dict[int, ArchiveDamage] = {}
    seen = set[int]()  # a scan may give a file twice
    runs = size = 0
    async for file in archived.files():
        if not file.is_whole or file.number in seen:
            continue
        why = await _damage(opened, file)
        if why and not await opened.connection.execute("HEXISTS", entered, file.number):
            continue  # removed meanwhile: its runs were brought back, or purged
        seen.add(file.number)
        if not why:
            runs, size = runs + await _alone_in(opened, file), size + file.size
        if why:
            damaged[file.number] = ArchiveDamage(
                file=file.name, url=file.url, why=why, runs=file.runs
            )
        report(len(seen))
    named = await _runs_of(opened, set(list(damaged)[:MOST_NAMED]))
    found = [
        one.model_copy(update={"run_ids": tuple(sorted(named.get(number, ())))})
        for number, one in damaged.items()
    ]
    return ArchiveVerification(files=len(seen), runs=runs, bytes=size, damaged=tuple(found))


async def _alone_in(opened: Opened, file: ArchiveFile) -> int:
    """Return how many runs of a file are nowhere else."""
    return sum([len(page) async for page in opened.reads.archived.runs(file)])


async def _damage(opened: Opened, file: ArchiveFile) -> str:
    """Return what is wrong with a file; empty for a good one."""
    try:
        data = await opened.reads.archived.place(file.url).read(file.name)
        if len(data) != file.size:
            return f"it has {len(data):,} bytes, and was written with {file.size:,}"
        _, copies = await asyncio.to_thread(read_all, data)
    except ArchiveError as error:
        if not error.is_missing:
            raise
        return "it is missing"
    except SerializationError as error:
        return error.message
    if len(copies) != file.runs:
        return f"it has {len(copies):,} runs, and was written with {file.runs:,}"
    return ""


async def _runs_of(opened: Opened, numbers: set[int]) -> dict[int, list[str]]:
    """Return the runs that Redis says are in these files: a look at all archived runs, in pages."""
    found: dict[int, list[str]] = {}
    if not numbers:
        return found
    tags = [opened.keys.tag(shard) for shard in range(opened.keys.shards)]
    for key in (f"{tag}archived:{part:02x}" for tag in tags for part in range(SUFFIXES)):
        cursor = "0"
        while True:
            reply = await opened.connection.execute("HSCAN", key, cursor, "COUNT", PAGE)
            cursor, flat = reply
            pairs = (
                flat if isinstance(flat, dict) else dict(zip(flat[::2], flat[1::2], strict=True))
            )
            for run_id, stored in pairs.items():
                number = int(stored.partition(" ")[0])
                if number in numbers:
                    found.setdefault(number, []).append(run_id)
            if str(cursor) == "0":
                break
    return found
