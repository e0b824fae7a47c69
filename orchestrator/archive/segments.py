"""Files of archived runs: compressed lines of JSON, and an index at the end. Pure.

A file is a row of zstd frames (RFC 8878), so `zstdcat` shows all of it. Each frame holds the lines
of some runs, the last one the index: where the frames are, which runs they hold, and the
configurations of their agents. A skippable frame behind it says where the index begins. Whoever
wants one run reads the index and one frame.
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

import orjson
import zstandard

from stepfleet.orchestrator.errors import SerializationError

SCHEMA = 1
SUFFIX = ".jsonl.zst"
FRAME_BYTES = 262_144
"""About how many bytes of lines are in a frame, unless one run has more."""
LONGEST_ERROR = 2_000
"""Characters of an error by which lists select."""
LARGEST = 1 << 30
"""Bytes of a frame's lines; one that claims more is refused."""
_LEVEL = 3
"""6 takes four times as long, for files 3 to 6% smaller."""
_TRAILER = struct.Struct("<IIQQ")
"""A skippable frame: its magic number, its size, and where the index is and how long."""
_SKIPPABLE = 0x184D2A5E
TRAILER_BYTES = _TRAILER.size
Fields = dict[str, str]


@dataclass(frozen=True, slots=True)
class RunCopy:
    """All that Redis has of an ended run: its hashes by the ends of their keys, and its events.

    The header's key has the end ''. Events are those of the stream, with their ids.
    """

    run_id: str
    hashes: Mapping[str, Fields]
    events: Sequence[tuple[str, Fields]] = ()

    @property
    def header(self) -> Fields:
        """The fields of the run's header."""
        return self.hashes[""]

    def line(self) -> bytes:
        """Return the run as a line, with its line break."""
        events = [list(one) for one in self.events]
        line = {"schema": SCHEMA, "run_id": self.run_id, "hashes": self.hashes, "events": events}
        return orjson.dumps(line) + b"\n"

    @classmethod
    def of_line(cls, line: bytes) -> Self:
        """Read a line. Raises `ValueError`, `LookupError` or `TypeError` on anything else."""
        found = orjson.loads(line)
        _check_schema(found)
        events = [(place, values) for place, values in found["events"]]
        return cls(found["run_id"], found["hashes"], events)


@dataclass(frozen=True, slots=True)
class ArchivedEntry:
    """A run in the index of its file: what lists of runs select by. `created` is in ms.

    `listed` is its status or its stop reason, whichever the lists of runs go by.
    """

    run_id: str
    frame: int
    created: int
    listed: str
    agent: str
    tenant: str = ""
    parent: str = ""
    batch: str = ""
    error: str = ""

    @property
    def order(self) -> tuple[int, bytes]:
        """A key by which runs are sorted in lists."""
        return self.created, self.run_id.encode()


@dataclass(frozen=True, slots=True)
class SegmentIndex:
    """The index of a file: runs by their times of creation, and where they are.

    `frames` are their places and lengths in bytes, `configs` JSON texts.
    """

    frames: Sequence[tuple[int, int]]
    runs: Sequence[ArchivedEntry]
    configs: Mapping[str, str]

    def stored(self) -> bytes:
        """Return the index as a line."""
        names = [one.name for one in fields(ArchivedEntry)]
        line = {
            "schema": SCHEMA,
            "frames": self.frames,
            "names": names,
            "index": [list(asdict(one).values()) for one in self.runs],
            "configs": self.configs,
        }
        return orjson.dumps(line) + b"\n"


@dataclass(frozen=True, slots=True)
class Segment:
    """A file in memory, and where its index is."""

    data: bytes
    index: SegmentIndex
    index_at: int

    @property
    def index_bytes(self) -> int:
        """The length of the index, with the trailer behind it."""
        return len(self.data) - self.index_at


def build(runs: Sequence[tuple[RunCopy, str]], configs: Mapping[str, str]) -> Segment:
    """Return the file of some runs, each with the list that it is in."""
    data, frames, entries = bytearray(), list[tuple[int, int]](), list[ArchivedEntry]()
    packer = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True, write_content_size=True)
    for part in _parts(runs):
        frame = packer.compress(b"".join(line for _, _, line in part))
        entries += [_entry(copy, listed, len(frames)) for copy, listed, _ in part]
        frames.append((len(data), len(frame)))
        data += frame
    entries.sort(key=lambda one: one.order)
    index, at = SegmentIndex(frames, entries, configs), len(data)
    data += packer.compress(index.stored())
    data += _TRAILER.pack(_SKIPPABLE, _TRAILER.size - 8, at, len(data) - at)
    return Segment(bytes(data), index, at)


def _parts(runs: Sequence[tuple[RunCopy, str]]) -> Iterator[list[tuple[RunCopy, str, bytes]]]:
    part, size = list[tuple[RunCopy, str, bytes]](), 0
    for copy, listed in runs:
        line = copy.line()
        if part and size + len(line) > FRAME_BYTES:
            yield part
            part, size = [], 0
        part.append((copy, listed, line))
        size += len(line)
    if part:
        yield part


def _entry(copy: RunCopy, listed: str, frame: int) -> ArchivedEntry:
    header = copy.header
    plain = {name: header.get(name, "") for name in ("agent", "tenant", "parent", "batch")}
    error = header.get("error", "")[:LONGEST_ERROR]
    return ArchivedEntry(copy.run_id, frame, int(header["created"]), listed, **plain, error=error)


def place_of_index(trailer: bytes) -> tuple[int, int]:
    """Return where the index is and how long, from a file's last `TRAILER_BYTES` bytes.

    Raises `SerializationError` where the file ends in another way.
    """
    if len(trailer) == TRAILER_BYTES:
        magic, _, at, length = _TRAILER.unpack(trailer)
        if magic == _SKIPPABLE:
            return at, length
    raise SerializationError(
        "it does not end as an archive's file does: it was cut, or is another's"
    )


def read_index(data: bytes) -> SegmentIndex:
    """Return an index. More bytes may follow it; raises `SerializationError` if it is damaged."""
    try:
        found = orjson.loads(_plain(data))
        _check_schema(found)
        names = found["names"]
        runs = [ArchivedEntry(**dict(zip(names, one, strict=True))) for one in found["index"]]
        frames = [(int(at), int(length)) for at, length in found["frames"]]
        _check_places(frames, runs)
        return SegmentIndex(frames, runs, found["configs"])
    except (ValueError, LookupError, TypeError, zstandard.ZstdError) as error:
        raise SerializationError(f"its index cannot be read: {error}") from None


def _check_places(frames: Sequence[tuple[int, int]], runs: Sequence[ArchivedEntry]) -> None:
    end = 0
    for at, length in frames:
        if at != end or length <= 0:
            raise ValueError("its parts do not lie side by side")
        end = at + length
    for one in runs:
        if not (isinstance(one.created, int) and one.frame in range(len(frames))):
            raise ValueError(f"run {one.run_id} is in none of its parts")


def frame_bytes(data: bytes) -> int:
    """Return how many bytes of lines a frame has, by what it says of itself."""
    return int(zstandard.frame_content_size(data))


def read_frame(data: bytes) -> dict[str, RunCopy]:
    """Return the runs of a frame by their ids. Raises `SerializationError` where it is damaged."""
    try:
        copies = [RunCopy.of_line(line) for line in _plain(data).splitlines()]
    except (ValueError, LookupError, TypeError, zstandard.ZstdError) as error:
        raise SerializationError(f"a part of it cannot be read: {error}") from None
    return {one.run_id: one for one in copies}


def read_all(data: bytes) -> tuple[SegmentIndex, dict[str, RunCopy]]:
    """Return the index and all runs of a whole file. Raises `SerializationError`."""
    at, length = place_of_index(data[-TRAILER_BYTES:])
    index = read_index(data[at : at + length])
    runs: dict[str, RunCopy] = {}
    for place, size in index.frames:
        runs |= read_frame(data[place : place + size])
    if missing := [one.run_id for one in index.runs if one.run_id not in runs]:
        raise SerializationError(f"run {missing[0]} is in its index, and not in it")
    return index, runs


def _check_schema(line: Mapping[str, Any]) -> None:
    if line["schema"] != SCHEMA:
        raise ValueError(f"its schema is {line['schema']!r}, not {SCHEMA}: upgrade this client")


def _plain(data: bytes) -> bytes:
    size = zstandard.frame_content_size(data)
    if not 0 <= size <= LARGEST:
        raise ValueError(f"it claims to hold {size:,} bytes; at most {LARGEST:,} are read")
    unpacker: Any = zstandard.ZstdDecompressor()
    plain: bytes = unpacker.decompress(data, max_output_size=LARGEST, allow_extra_data=True)
    return plain


__all__ = [
    "SUFFIX",
    "TRAILER_BYTES",
    "ArchivedEntry",
    "RunCopy",
    "Segment",
    "SegmentIndex",
    "build",
    "frame_bytes",
    "place_of_index",
    "read_all",
    "read_frame",
    "read_index",
]
