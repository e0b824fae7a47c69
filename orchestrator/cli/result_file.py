"""Files of results: their lines, how they are written, and where they go.

A new file can be read by its owner only, since results and prompts are private. An existing file
keeps its mode, also where it is replaced.
"""

import contextlib
import errno
import glob
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, Self
from uuid import UUID

from stepfleet.orchestrator.batches.files.openai_format import to_openai_line
from stepfleet.orchestrator.batches.files.tables import cells, select
from stepfleet.orchestrator.batches.results import as_line, full, slim
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.records import exact_json
from stepfleet.orchestrator.records.run.results import AgentRunResult


class FullDiskError(ConfigurationError):
    """A results file has no space left on its disk: it can be written as soon as there is some."""


def check_writable(path: Path) -> None:
    """Raise `ConfigurationError` where `path` cannot become a results file; changes nothing."""
    if is_special(path):
        # Opening a pipe and closing it again would be its reader's end of file.
        if not os.access(path, os.W_OK):
            raise not_writable(path, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))
        return
    existed = path.exists()
    os.close(open_to_append(path))
    if not existed:
        path.unlink()


def check_apart(out: Path, source: Path) -> None:
    """Raise `ConfigurationError` where results would be written into their own input file."""
    if out.exists() and source.exists() and out.samefile(source):
        raise ConfigurationError(f"--out {out} is the input file; name another file for results")


def is_empty(path: Path) -> bool:
    """Return whether the file is missing or empty; pipes and devices keep nothing."""
    return is_special(path) or not path.exists() or path.stat().st_size == 0


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Give a file next to `path`, and move it there whole when it is complete and on the disk.

    A pipe or device gets the bytes at once. Raises `ConfigurationError` where it cannot be
    written (a full disk).
    """
    if is_special(path):
        with _translated(path), os.fdopen(open_to_append(path), "wb") as file:
            yield file
        return
    check_writable(path)
    with _translated(path), beside(path.resolve()) as file:
        yield file


@contextlib.contextmanager
def beside(place: Path) -> Iterator[IO[bytes]]:
    """Give a file that takes the place of another one when it is complete and on the disk."""
    _remove_left(place)
    fresh = place.with_name(f".{place.name}.{os.getpid()}.new")
    # Created exclusively: a link that somebody else has put there is not followed.
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            if place.exists():
                fresh.chmod(stat.S_IMODE(place.stat().st_mode))
            os.fsync(file.fileno())
        fresh.replace(place)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise


def _remove_left(place: Path) -> None:
    """Remove the unfinished replacements of processes that were killed, and our own."""
    for left in place.parent.glob(f".{glob.escape(place.name)}.*.new"):
        process = left.name.removesuffix(".new").rpartition(".")[2]
        if process.isdigit() and (int(process) == os.getpid() or not _is_alive(int(process))):
            left.unlink(missing_ok=True)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def open_to_append(path: Path) -> int:
    """Open a results file to append to it, and return its descriptor.

    Raises `ConfigurationError` with the fix.
    """
    try:
        if is_special(path):
            # To write only: a device such as /dev/full can be read without end.
            return _open_special(path)
        return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
    except OSError as error:
        raise not_writable(path, error) from None


def _open_special(path: Path) -> int:
    try:
        # Waiting for a reader could not be interrupted.
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        msg = f"--out {path}: this pipe has no reader; start its reader first"
        raise ConfigurationError(msg) from None
    os.set_blocking(descriptor, True)
    return descriptor


def is_special(path: Path) -> bool:
    """Return whether `path` exists and is neither a file nor a folder."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def not_writable(path: Path, error: OSError) -> ConfigurationError:
    """Return the error of a file that cannot be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT) and not is_special(path):
        msg = f"--out {path} cannot be written: {error.strerror}; make room on its disk"
        return FullDiskError(msg)
    return ConfigurationError(
        f"--out {path} cannot be written: {error.strerror}; name a file in a folder that exists "
        "and that you may write to"
    )


@contextlib.contextmanager
def _translated(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno is None:  # a timeout, of something else
            raise
        raise not_writable(path, error) from None


Kind = Literal["full", "slim", "openai", "fields", "csv", "parquet"]


@dataclass(frozen=True, slots=True)
class Layout:
    """The form of results: full, slim or OpenAI's lines; lines of `fields`; a table of `fields`."""

    kind: Kind
    fields: str | None = None

    @property
    def grows(self) -> bool:
        """Whether lines are appended as runs end: they name their run and its end.

        A file of any other form is written as a whole when the batch has ended.
        """
        return self.kind in {"full", "slim", "openai"}

    @property
    def is_table(self) -> bool:
        """Whether all rows have the same columns, known only when all of them are."""
        return self.kind in {"csv", "parquet"}


_selected = lru_cache(maxsize=1)(select)
_ID = re.compile(rb'\{"id":"(?:[^"\\]|\\.)*\\?', re.DOTALL)
_BEHIND_ID = b'","run_id":"'
_OPENAI_BEGINNING = b'{"id":"batch_req_'
_OPENAI_ID = re.compile(r"batch_req_([0-9a-f]{32})(?:_([0-9a-f]{1,16}))?")


class Mark(NamedTuple):
    """The run of a line, and the end of the run that the line is of.

    `ended` is None where the line does not have it, or is of another layout: it is stale then.
    """

    run_id: str
    ended: datetime | None


def to_line(result: AgentRunResult, layout: Layout) -> bytes:
    """Return the line of a run, with its line break."""
    makers = {"openai": to_openai_line, "slim": slim, "full": full}
    make = makers.get(layout.kind)
    return as_line(make(result) if make else cells(result, _selected(layout.fields)))


def mark_of(line: bytes, layout: Layout) -> Mark | None:
    """Return the mark of a line that was written before; None if it has none."""
    try:
        data = exact_json.loads(line)
    except ValueError:
        return None
    if not isinstance(data, dict):
        return None
    return _openai_mark(data) if layout.kind == "openai" else _own_mark(data, layout)


def is_begun(cut: bytes, layout: Layout) -> bool:
    """Return whether a line without its end is the beginning of one that `to_line` makes."""
    if layout.kind == "openai":
        return _agree(cut, _OPENAI_BEGINNING)
    own = _ID.match(cut)
    return _agree(cut[own.end() :], _BEHIND_ID) if own else _agree(cut, b'{"id":"')


def _agree(one: bytes, other: bytes) -> bool:
    return one.startswith(other) or other.startswith(one)


def _own_mark(data: dict[str, Any], layout: Layout) -> Mark | None:
    run_id, ended = data.get("run_id"), data.get("end_time")
    if not isinstance(run_id, str):
        return None
    is_same = ("steps" in data) == (layout.kind == "full")
    if not is_same or "shouldContinue" in (data.get("outcome") or {}):  # by an earlier version
        return Mark(run_id, None)
    try:
        return Mark(run_id, datetime.fromisoformat(ended) if ended else None)
    except (TypeError, ValueError):
        return Mark(run_id, None)


def _openai_mark(data: dict[str, Any]) -> Mark | None:
    found = _OPENAI_ID.fullmatch(str(data.get("id")))
    if found is None or "custom_id" not in data:
        return None
    run, ended = found.groups()
    moment = datetime.fromtimestamp(int(ended, 16) / 1000, UTC) if ended else None
    return Mark(str(UUID(run)), moment)


class ResultFile:
    """A results file; lines that it already has are kept, unless their runs have ended anew.

    Opening raises `ConfigurationError` where the file cannot be written or holds other data;
    `add` and `settle` raise it when lines cannot be written: `FullDiskError` for a full disk.
    """

    def __init__(self, path: Path, layout: Layout) -> None:
        self.path = path
        self._layout = layout
        self._descriptor = open_to_append(path)
        self._regular = stat.S_ISREG(os.fstat(self._descriptor).st_mode)
        self._ends: dict[str, datetime | None] = {}
        self._places: dict[str, int] = {}
        self._size = 0
        self._stale = False
        try:
            # A pipe or a device has no earlier lines.
            if self._regular:
                self._read()
        except BaseException:
            os.close(self._descriptor)
            raise

    @property
    def ends(self) -> Mapping[str, datetime | None]:
        """The runs in the file, with the ends that their lines are of."""
        return self._ends

    def add(self, result: AgentRunResult) -> None:
        """Append the run's line unless it is there."""
        run_id, ended = result.run_id, result.end_time
        if run_id in self._ends and self._ends[run_id] == ended:
            return
        line = to_line(result, self._layout)
        try:
            # O_APPEND and one write: a line is complete or, after a crash, cut at the end.
            written = os.write(self._descriptor, line)
            while written < len(line):
                written += os.write(self._descriptor, line[written:])
        except OSError as error:
            if self._regular:
                os.ftruncate(self._descriptor, self._size)  # the part that had room
            raise not_writable(self.path, error) from None
        self._note(run_id, ended, len(line))

    def settle(self, order: Iterable[str] = ()) -> None:
        """Leave one line for each run; with `order`, those of its runs first, in that order.

        The file is replaced as a whole, or not at all where nothing would change.
        """
        runs = self._in(order)
        if not self._regular or (not self._stale and runs == list(self._places)):
            return
        places, size = {}, 0
        try:
            with self.path.open("rb") as old, beside(self.path.resolve()) as fresh:
                for run_id in runs:
                    old.seek(self._places[run_id])
                    line = old.readline()
                    fresh.write(line)
                    places[run_id] = size
                    size += len(line)
        except OSError as error:
            raise not_writable(self.path, error) from None
        os.close(self._descriptor)
        self._descriptor = open_to_append(self.path)
        self._places, self._size, self._stale = places, size, False

    def close(self) -> None:
        """Make the lines durable and close the file."""
        try:
            if self._regular:
                os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            # On a full disk there is no place for another file.
            if kind is None or not issubclass(kind, ConfigurationError):
                self.settle()
        finally:
            self.close()

    def _in(self, order: Iterable[str]) -> list[str]:
        """Return the runs of the file: those of `order` first, the others as they are."""
        first = {run_id: None for run_id in order if run_id in self._places}
        return [*first, *(run_id for run_id in self._places if run_id not in first)]

    def _note(self, run_id: str, ended: datetime | None, length: int) -> None:
        """Note a line at the end of the file."""
        if run_id in self._ends:
            self._stale = True
            del self._places[run_id]  # it comes last now
        self._ends[run_id] = ended
        self._places[run_id] = self._size
        self._size += length

    def _read(self) -> None:
        """Note the lines of the file; cut off a last line without its end."""
        for mark, length in _marks(self.path, self._layout):
            self._note(mark.run_id, mark.ended, length)
        os.ftruncate(self._descriptor, self._size)


def check_results(path: Path, layouts: Iterable[Layout]) -> None:
    """Raise `ConfigurationError` where `path` holds no results in any of `layouts`.

    The file stays as it is. A pipe or a device holds nothing.
    """
    if is_empty(path):
        return
    refusals = [_refusal(path, layout) for layout in layouts]
    if refusals and all(refusals):
        raise ConfigurationError(refusals[0] or "")


def runs_in(path: Path, layout: Layout) -> set[str]:
    """Return the runs of which a results file has whole lines; the file stays as it is.

    Raises `ConfigurationError` for a line that is not a result.
    """
    return {mark.run_id for mark, _ in _marks(path, layout)}


def _refusal(path: Path, layout: Layout) -> str | None:
    try:
        for _ in _marks(path, layout):
            pass
    except ConfigurationError as error:
        return error.message
    return None


def _marks(path: Path, layout: Layout) -> Iterator[tuple[Mark, int]]:
    """Yield mark and length of each whole line; a line that a crash has cut is left out.

    Raises `ConfigurationError` for a line, also one without its end, that is not a result.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            is_whole = line.endswith(b"\n")
            mark = mark_of(line, layout) if is_whole else None
            if mark is not None:
                yield mark, len(line)
            elif is_whole or not is_begun(line, layout):
                form = "openai" if layout.kind == "openai" else "stepfleet"
                msg = (
                    f"--out {path}: line {number} is not a result of format {form}; "
                    "name another file, so that the two are not mixed"
                )
                raise ConfigurationError(msg)
