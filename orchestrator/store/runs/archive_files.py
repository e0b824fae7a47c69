"""Which files the archive has: entered before they are written, and again when they are whole."""

import logging
import secrets
from typing import Any

import orjson

from stepfleet.orchestrator.archive.places import ArchivePlace
from stepfleet.orchestrator.errors import ArchiveError
from stepfleet.orchestrator.store import keys
from stepfleet.orchestrator.store.archived import FAILURES, ArchiveFile
from stepfleet.orchestrator.store.codec import milliseconds
from stepfleet.orchestrator.store.gateway import Gateway, Opened
from stepfleet.orchestrator.store.lua import run_script

log = logging.getLogger(__name__)
MARKER = "stepfleet-archive.json"
"""The file by which a place is known again."""
_NEW = "new:"
ENTER_MS = 1_800_000
"""How long after its name was entered a file may get its runs; Redis itself holds to it."""
DROP_MS = 2 * ENTER_MS
"""When no more runs can come into a file."""


class ArchiveFiles(Gateway):
    """Enters and removes the files of one archive."""

    def __init__(self, opened: Opened) -> None:
        super().__init__(opened)
        names = (keys.ARCHIVE_FILES, keys.ARCHIVE_ORDER, keys.ARCHIVE_OPEN, keys.ARCHIVE_STATE)
        self._files, self._order, self._open, self._state = map(opened.keys.of, names)
        self._archived = opened.reads.archived

    async def check_place(self, place: ArchivePlace) -> None:
        """Raise `ArchiveError` where a place is not the one that this store has used before.

        A file there names the store: a disk that is not mounted has none, and another fleet's
        folder has another.
        """
        field = f"place:{place.url}"
        known = await self._connection.execute("HGET", self._state, field)
        if known is None:
            if MARKER in await place.names():
                msg = f"archive {place.url} is another fleet's: give this one a folder of its own"
                raise ArchiveError(msg)
            await self.note(("HSETNX", self._state, field, f"{_NEW}{secrets.token_hex(16)}"))
            known = await self._connection.execute("HGET", self._state, field)
        token = str(known).removeprefix(_NEW)
        marker = orjson.dumps({"schema": 1, "store": token})
        if str(known).startswith(_NEW):
            await place.write(MARKER, marker)
            await self.note(("HSET", self._state, field, token))
        try:
            same = await place.read(MARKER) == marker
        except ArchiveError as error:
            if not error.is_missing:
                raise
            same = False
        if not same:
            msg = f"archive {place.url} lacks this fleet's {MARKER}: is the right disk mounted?"
            raise ArchiveError(msg)

    async def new_number(self) -> int:
        """Return a number that no file has had, also where Redis has lost its newest writes."""
        tenths = milliseconds(await self._connection.now()) // 100
        last = int(await self._connection.execute("HGET", self._state, "files") or 0)
        step = max(tenths - last, 1)
        return int(await self.note(("HINCRBY", self._state, "files", step)))

    async def enter(self, file: ArchiveFile) -> None:
        """Enter a file, or what is known of it now."""
        writes: list[tuple[Any, ...]] = [("HSET", self._files, file.number, file.to_json())]
        if file.is_whole:
            writes.append(("ZADD", self._order, file.newest, file.member))
        else:
            writes.append(("ZADD", self._open, file.at, file.number))
        await self.note(*writes)

    async def note(self, *writes: tuple[Any, ...], of: str = "") -> Any:
        """Make small writes together, in a full Redis too; return the reply to the first.

        Their keys are in the slot of the hash `of`, or else of the archive's own.
        """
        commands = orjson.dumps([list(map(str, one)) for one in writes]).decode()
        return await run_script(self._connection, "archive_writes", [of or self._state], commands)

    async def close_old(self) -> None:
        """Look once at each file into which no more runs can come: the useless ones are removed.

        Those are files that a process which is gone, or sleeps, has not finished, and files all of
        whose runs are in Redis or in others.
        """
        before = milliseconds(await self._connection.now()) - DROP_MS
        old = await self._connection.execute("ZRANGEBYSCORE", self._open, "-inf", before)
        for number in old:
            stored = await self._connection.execute("HGET", self._files, number)
            if stored:
                await self._close(ArchiveFile.from_json(stored))
            await self._connection.execute("ZREM", self._open, number)

    async def _close(self, file: ArchiveFile) -> None:
        try:
            if not file.is_whole:
                await self.drop(file)
            else:
                await self.drop_if_empty(file)
        except FAILURES as error:
            if isinstance(error, ArchiveError) and not error.is_missing:
                raise
            log.warning("the archive's file %s stays as it is: %s", file.name, error)

    async def is_open(self, number: int) -> bool:
        """Return whether runs may come into a file still."""
        return await self._connection.execute("ZSCORE", self._open, number) is not None

    async def drop(self, file: ArchiveFile) -> None:
        """Remove a file. Raises `ArchiveError`."""
        await self._archived.place(file.url).remove(file.name)
        await self._connection.execute("ZREM", self._order, file.member)
        await self._connection.execute("HDEL", self._files, file.number)
        await self._connection.execute("ZREM", self._open, file.number)
        self._archived.forget(file.number)

    async def drop_if_empty(self, file: ArchiveFile) -> None:
        """Remove a file into which no more runs come, if none is there alone."""
        async for found in self._archived.runs(file):
            if found:
                return
        await self.drop(file)
