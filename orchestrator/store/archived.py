"""Reads runs from the archive as if Redis had them still: in one place, for all that read runs.

Redis has for each archived run the number of its file, in small hashes of its shard, and for each
file where it is. A file has an index and frames of runs (see archive/segments.py); both are read
when they are needed, by ranges, and a few are kept.
"""

import asyncio
import heapq
import logging
import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from pydantic import ConfigDict

from stepfleet.orchestrator.archive.places import ArchivePlace
from stepfleet.orchestrator.archive.segments import (
    ArchivedEntry,
    RunCopy,
    SegmentIndex,
    frame_bytes,
    read_frame,
    read_index,
)
from stepfleet.orchestrator.errors import ArchiveError, ConfigurationError, SerializationError
from stepfleet.orchestrator.records.base import Record
from stepfleet.orchestrator.redis_client.connection import Connection
from stepfleet.orchestrator.settings.settings import Settings
from stepfleet.orchestrator.store import keys
from stepfleet.orchestrator.store.configs import Configs
from stepfleet.orchestrator.store.keys import Keys

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")
log = logging.getLogger(__name__)
Failure = ArchiveError | ConfigurationError | SerializationError
FAILURES = (ArchiveError, ConfigurationError, SerializationError)
Report = Callable[[Failure, Sequence[str]], None]
"""Gets why runs cannot be read, and which."""
"""What reading an archive may raise: out of reach, not to be opened here, or damaged."""
LOOK_SECONDS = 2.0
"""How long a client believes that a fleet has no archive; nothing is moved before all know."""
KEPT_INDEXES = 16
KEPT_FRAMES = 32
KEPT_BYTES = 1024 * 1024
"""A frame with more bytes of lines, which has one long run, is not kept."""
TOGETHER_BYTES = 1024 * 1024
"""Neighbouring frames of at most so many bytes, compressed, are read together."""
_PASSING = ("memory", "blockcache", "cached", "filecache", "simplecache")
PAGE = 1_000
MOST_LOOKED = 2_000
"""Runs of the archive that one page of a list looks at."""
MOST_FILES = 8
"""Files that one page of a list opens, and more only until it has looked at one run."""


class ArchiveFile(Record):
    """A file of the archive, as Redis knows it. Times are in ms, sizes in bytes.

    It was written at `at`; `oldest` and `newest` are when runs of it were created. `batch_id` is
    set where all are of one batch. Until it `is_whole` it is being written.
    """

    model_config = ConfigDict(extra="ignore")  # a newer version may say more

    number: int
    name: str
    url: str
    at: int
    batch_id: str | None = None
    runs: int = 0
    oldest: int = 0
    newest: int = 0
    size: int = 0
    index_at: int = 0
    index_bytes: int = 0
    is_whole: bool = False

    @property
    def member(self) -> str:
        """The file in the index of all, whose scores are the newest times."""
        return f"{self.number} {self.oldest}"


class _Where(NamedTuple):
    number: int
    status: str


@dataclass(slots=True)
class _Kept(Generic[K, V]):
    """The values that were used last, `most` of them."""

    most: int
    values: OrderedDict[K, V] = field(default_factory=OrderedDict)

    def get(self, key: K) -> V | None:
        if key in self.values:
            self.values.move_to_end(key)
        return self.values.get(key)

    def put(self, key: K, value: V) -> None:
        self.values[key] = value
        self.values.move_to_end(key)
        if len(self.values) > self.most:
            self.values.popitem(last=False)


def leave_out(error: Failure, run_ids: Sequence[str]) -> None:
    """Note in the log that runs are left out whose file is damaged or gone.

    Raises `error` where it is not of the file: what cannot be reached is there all the same.
    """
    if not isinstance(error, SerializationError) and not getattr(error, "is_missing", False):
        raise error
    note_left_out(error, run_ids)


def note_left_out(error: Failure, run_ids: Sequence[str]) -> None:
    """Note in the log that runs are left out."""
    named = ", ".join(run_ids[:5]) + (" ..." if len(run_ids) > 5 else "")  # noqa: PLR2004
    log.error("%d archived runs are left out (%s): %s", len(run_ids), named, error)


class ArchivedRuns:
    """Finds and reads the runs of the archive."""

    def __init__(
        self, settings: Settings, connection: Connection, names: Keys, configs: Configs
    ) -> None:
        self._settings, self._connection, self._keys = settings, connection, names
        self._configs = configs
        self._files, self._order, self._state = map(
            names.of, (keys.ARCHIVE_FILES, keys.ARCHIVE_ORDER, keys.ARCHIVE_STATE)
        )
        self._is_used, self._unused_until = False, 0.0
        self._places: dict[str, ArchivePlace] = {}
        self._known: dict[int, ArchiveFile] = {}
        self._indexes: _Kept[int, SegmentIndex] = _Kept(KEPT_INDEXES)
        self._frames: _Kept[tuple[int, int], dict[str, RunCopy]] = _Kept(KEPT_FRAMES)

    async def is_used(self) -> bool:
        """Return whether the fleet has an archive, as far as this client knows."""
        if not self._is_used and time.monotonic() >= self._unused_until:
            self._is_used = bool(await self._connection.execute("EXISTS", self._state))
            self._unused_until = time.monotonic() + LOOK_SECONDS
        return self._is_used

    async def where(self, run_ids: Sequence[str]) -> dict[str, _Where]:
        """Return the numbers of the files, and the statuses, of those that are archived."""
        if not run_ids or not await self.is_used():
            return {}
        reads = (("HGET", self._keys.archived(one), one) for one in run_ids)
        found = await self._connection.execute_all(*reads)
        return {
            run_id: _Where(int(number), status)
            for run_id, stored in zip(run_ids, found, strict=True)
            if stored
            for number, _, status in [stored.partition(" ")]
        }

    async def load(
        self, places: Mapping[str, _Where], report: Report | None = None
    ) -> dict[str, RunCopy]:
        """Return the runs at these places, as `where` has found them.

        A file that cannot be read raises `ArchiveError`, `ConfigurationError` or
        `SerializationError`; with `report` its runs are left out, and that gets them and the
        reason.
        """
        copies: dict[str, RunCopy] = {}
        for number, some in _by_file(places).items():
            file = await self.file(number)
            if file is None:
                continue  # it was brought back meanwhile
            copies |= await self._readable(file, some, report)
        return copies

    async def _readable(
        self, file: ArchiveFile, run_ids: Sequence[str], report: Report | None
    ) -> dict[str, RunCopy]:
        try:
            return await self._all_of(file, run_ids)
        except FAILURES as error:
            if report is None:
                raise
            if len(run_ids) == 1 or not isinstance(error, SerializationError):
                report(error, run_ids)
                return {}
        copies: dict[str, RunCopy] = {}
        for one in run_ids:  # parts of the file may be good
            copies |= await self._readable(file, [one], report)
        return copies

    async def file(self, number: int, *, anew: bool = False) -> ArchiveFile | None:
        """Return the file with that number, once it is whole; `anew`: as it is now."""
        if anew or number not in self._known:
            stored = await self._connection.execute("HGET", self._files, number)
            if stored is None or not (file := ArchiveFile.from_json(stored)).is_whole:
                return None
            self._known[number] = file
        return self._known[number]

    async def files(self) -> AsyncIterator[ArchiveFile]:
        """Yield all files, those being written too, in no order."""
        cursor = "0"
        while True:
            cursor, flat = await self._connection.execute(
                "HSCAN", self._files, cursor, "COUNT", PAGE
            )
            for stored in flat.values() if isinstance(flat, dict) else flat[1::2]:
                yield ArchiveFile.from_json(stored)
            if str(cursor) == "0":
                return

    def place(self, url: str | None = None) -> ArchivePlace:
        """Return the place of a file's URL; without one, of the settings.

        Raises `ConfigurationError`.
        """
        own = self._settings.archive_url.get_secret_value() if self._settings.archive_url else ""
        if own not in self._places and own:
            _check_lasting(own)
            self._places[own] = ArchivePlace.open(own)
        if own and url in (None, self._places[own].url):
            return self._places[own]
        if url is None:
            msg = "no archive is named: set STEPFLEET_ARCHIVE_URL, such as s3://bucket/folder"
            raise ConfigurationError(msg)
        if url not in self._places:
            self._places[url] = ArchivePlace.open(url)
        return self._places[url]

    async def runs(
        self, file: ArchiveFile, pages: Iterable[Sequence[str]] | None = None
    ) -> AsyncIterator[list[str]]:
        """Yield the runs that are in a file, and nowhere else, page by page. Raises as `load`.

        They are among those of `pages`; without these the file's index is read.
        """
        if pages is None:
            ids = [one.run_id for one in (await self.index(file)).runs]
            pages = (ids[at : at + PAGE] for at in range(0, len(ids), PAGE))
        for some in pages:
            found = await self.where(some)
            yield [run_id for run_id, (number, _) in found.items() if number == file.number]

    async def index(self, file: ArchiveFile) -> SegmentIndex:
        """Return a file's index. Raises as `load`."""
        known = self._indexes.get(file.number)
        if known is None:
            data = await self._part(file, file.index_at, file.index_bytes)
            known = await _decoded(file, read_index, data)
            self._indexes.put(file.number, known)
        return known

    def forget(self, number: int) -> None:
        """Forget what is kept of a file that is gone."""
        self._known.pop(number, None)
        self._indexes.values.pop(number, None)

    async def parts(self, places: Mapping[str, _Where]) -> AsyncIterator[dict[str, RunCopy]]:
        """Yield the runs at these places, as many together as `TOGETHER_BYTES` allow.

        Raises as `load`.
        """
        for number, some in _by_file(places).items():
            file = await self.file(number)
            if file is not None:
                async for part in self._parts(file, some):
                    yield part

    async def _all_of(self, file: ArchiveFile, run_ids: Sequence[str]) -> dict[str, RunCopy]:
        copies: dict[str, RunCopy] = {}
        async for part in self._parts(file, run_ids):
            copies |= part
        return copies

    async def _parts(
        self, file: ArchiveFile, run_ids: Sequence[str]
    ) -> AsyncIterator[dict[str, RunCopy]]:
        index = await self.index(file)
        for digest, text in index.configs.items():
            self._configs.remember(digest, text)
        wanted = set(run_ids)
        frames = sorted({one.frame for one in index.runs if one.run_id in wanted})
        found = set[str]()
        for numbers in _neighbours(frames, index.frames):
            kept = (self._frames.get((file.number, one)) for one in numbers)
            known = [one for one in kept if one is not None]
            if len(known) < len(numbers):
                known = await self._read_frames(file, index, numbers)
            every = ((name, copy) for frame in known for name, copy in frame.items())
            part = {name: copy for name, copy in every if name in wanted}
            found |= part.keys()
            yield part
        if lacking := wanted - found:
            msg = f"{file.name} in {file.url} has no run {min(lacking)}: it is another file"
            raise SerializationError(msg)

    async def _read_frames(
        self, file: ArchiveFile, index: SegmentIndex, numbers: Sequence[int]
    ) -> list[dict[str, RunCopy]]:
        first, (last, size) = index.frames[numbers[0]][0], index.frames[numbers[-1]]
        data = await self._part(file, first, last + size - first)
        found: list[dict[str, RunCopy]] = []
        for number in numbers:
            at, length = index.frames[number]
            part = data[at - first : at - first + length]
            frame = await _decoded(file, read_frame, part)
            found.append(frame)
            if frame_bytes(part) <= KEPT_BYTES:
                self._frames.put((file.number, number), frame)
        return found

    async def _part(self, file: ArchiveFile, at: int, length: int) -> bytes:
        return await self.place(file.url).read(file.name, at, length)

    # ---------------------------------------------------------------------------------- lists

    async def page(
        self,
        matches: Callable[[ArchivedEntry], bool],
        most: int,
        after: tuple[int, bytes] | None,
        since: int,
    ) -> tuple[list[ArchivedEntry], int, ArchivedEntry | None]:
        """Return up to `most` runs that match, the newest first, of those after a place.

        A place is a time of creation in ms and an id. Also returns how many it looked at, and the
        last of them where it did not come to the end. A file that cannot be read is left out, with
        a warning in the log.
        """
        waiting = await self._overlapping(after, since)
        heap: list[tuple[int, bytes, int, list[ArchivedEntry]]] = []
        found, looked, opened = list[tuple[int, ArchivedEntry]](), 0, 0
        last: ArchivedEntry | None = None
        while waiting or heap:
            while waiting and (not heap or waiting[-1][0] >= -heap[0][0]):
                if opened >= MOST_FILES and last is not None:
                    return await self._there(found), looked, last
                number = waiting.pop()[1]
                _push(heap, number, await self._after(number, after))
                opened += 1
            if not heap:
                break
            if looked >= MOST_LOOKED or len(found) >= most:
                return await self._there(found), looked, last
            _, _, number, entries = heapq.heappop(heap)
            last = entries.pop()
            _push(heap, number, entries)
            if last.created < since:
                break
            looked += 1
            if matches(last):
                found.append((number, last))
        return await self._there(found), looked, None

    async def _there(self, found: Sequence[tuple[int, ArchivedEntry]]) -> list[ArchivedEntry]:
        """Return the runs without those that were brought back, or moved again, since."""
        places = await self.where([one.run_id for _, one in found])
        return [
            one
            for number, one in found
            if one.run_id in places and places[one.run_id].number == number
        ]

    async def _overlapping(
        self, after: tuple[int, bytes] | None, since: int
    ) -> list[tuple[int, int]]:
        """Return the newest time and number of files that may have such runs, the newest last."""
        if not await self.is_used():
            return []
        found: list[tuple[int, int]] = []
        place = 0
        while True:
            given = (f"{since}", "+inf", "WITHSCORES", "LIMIT", place, PAGE)
            flat = await self._connection.execute("ZRANGEBYSCORE", self._order, *given)
            for member, score in zip(flat[::2], flat[1::2], strict=True):
                number, _, oldest = member.partition(" ")
                if after is None or int(oldest) <= after[0]:
                    found.append((int(float(score)), int(number)))
            if len(flat) < 2 * PAGE:
                return found
            place += PAGE

    async def _after(self, number: int, after: tuple[int, bytes] | None) -> list[ArchivedEntry]:
        """Return a file's runs after a place that are archived there, the newest last."""
        file = await self.file(number)
        if file is None:
            return []
        try:
            index = await self.index(file)
        except FAILURES as error:
            log.warning("runs in %s are left out of a list: %s", file.name, error)
            return []
        if after is None:
            return list(index.runs)
        return list(index.runs[: bisect_left(index.runs, after, key=lambda one: one.order)])


def _by_file(places: Mapping[str, _Where]) -> dict[int, list[str]]:
    of_files: dict[int, list[str]] = {}
    for run_id, (number, _) in places.items():
        of_files.setdefault(number, []).append(run_id)
    return of_files


def _check_lasting(url: str) -> None:
    """Raise `ConfigurationError` for a place that ends with the process, or hides the real one."""
    protocol = url.partition("://")[0]
    if "::" in url or protocol in _PASSING:
        msg = (
            f"archive_url begins with {protocol}: files there are not, or not at once, where they "
            "last; write the folder or storage itself, such as s3://bucket/folder"
        )
        raise ConfigurationError(msg)


def _push(
    heap: list[tuple[int, bytes, int, list[ArchivedEntry]]],
    number: int,
    entries: list[ArchivedEntry],
) -> None:
    if entries:
        newest = entries[-1]
        # Of equal times the greater id comes first, as in the lists of Redis.
        reverse = bytes(255 - one for one in newest.run_id.encode())
        heapq.heappush(heap, (-newest.created, reverse, number, entries))


def _neighbours(wanted: Sequence[int], frames: Sequence[tuple[int, int]]) -> Iterable[list[int]]:
    """Yield frames that lie side by side, up to a bound of bytes."""
    part: list[int] = []
    for one in wanted:
        end = frames[one][0] + frames[one][1]
        if part and (one != part[-1] + 1 or end - frames[part[0]][0] > TOGETHER_BYTES):
            yield part
            part = []
        part.append(one)
    if part:
        yield part


async def _decoded(file: ArchiveFile, read: Callable[[bytes], T], data: bytes) -> T:
    try:
        return await asyncio.to_thread(read, data)
    except SerializationError as error:
        msg = f"the archive's file {file.name} in {file.url} is damaged: {error.message}"
        raise SerializationError(msg) from None


class RunReads:
    """Reads keys of runs: from Redis and, where that has nothing of a run, from the archive."""

    def __init__(self, connection: Connection, archived: ArchivedRuns) -> None:
        self._connection, self.archived = connection, archived

    async def execute(self, *command: Any) -> Any:
        """Return the reply to one command. Raises as `Connection.execute` and `load` do."""
        return (await self.execute_all(command))[0]

    async def execute_all(
        self,
        *commands: tuple[Any, ...],
        report: Report | None = None,
    ) -> list[Any]:
        """Return the replies to commands that read, each one run.

        All that they get of one run is from Redis, or all from the archive. With `report`, runs of
        files that cannot be read are as if they were not there.
        """
        replies = await self._connection.execute_all(*commands)
        if not commands or not await self.archived.is_used():
            return replies
        runs = [_run_of(command[1]) for command in commands]
        run_ids = list(dict.fromkeys(run_id for run_id, _ in runs))
        # Another trip: calls that are sent together may travel side by side.
        moved = await self.archived.where(run_ids)
        if all(command[0] == "HGET" and command[2] == "status" for command in commands):
            return [
                moved[run_id].status if run_id in moved else reply
                for (run_id, _), reply in zip(runs, replies, strict=True)
            ]
        copies = await self.archived.load(moved, report)
        return [
            answer(copies[run_id], part, command[0], *command[2:]) if run_id in copies else reply
            for (run_id, part), command, reply in zip(runs, commands, replies, strict=True)
        ]


_PARTS = (":log", ":journal", ":outcomes", ":lost", ":events", ":returns", ":chunks")


def _run_of(key: str) -> tuple[str, str]:
    """Return the run and the part that a key names."""
    run_id = key.partition("}:run:")[2]
    for part in _PARTS:
        if run_id.endswith(part):
            return run_id.removesuffix(part), part
    return run_id, ""


def answer(copy: RunCopy, part: str, word: str, *given: Any) -> Any:
    """Return what Redis would reply to a command about a part of an archived run. Pure."""
    if word in ("XRANGE", "XREVRANGE"):
        return _events(copy, *given) if part == ":events" else []
    return _ANSWERS[word](copy.hashes.get(part, {}), list(map(str, given)))


_ANSWERS: Mapping[str, Callable[[Mapping[str, str], list[str]], Any]] = {
    "HGETALL": lambda stored, _: dict(stored),
    "HMGET": lambda stored, names: [stored.get(one) for one in names],
    "HGET": lambda stored, names: stored.get(names[0]),
    "HKEYS": lambda stored, _: list(stored),
    "HLEN": lambda stored, _: len(stored),
    "HSTRLEN": lambda stored, names: len(stored.get(names[0], "").encode()),
    "EXISTS": lambda stored, _: int(bool(stored)),
}


def _events(copy: RunCopy, first: str, last: str, *limits: Any) -> list[tuple[str, dict[str, str]]]:
    """Return the events after `first`, which begins with '(', as XRANGE does up to `last`, '+'."""
    if last != "+":
        raise ValueError(f"events up to {last!r} are not read from the archive")
    after = _event_place(first.removeprefix("("))
    found = [one for one in copy.events if _event_place(one[0]) > after]
    return found[: int(limits[1])] if limits else found


def _event_place(text: str) -> tuple[int, int]:
    at, _, number = text.partition("-")
    return int(at or 0), int(number or 0)
