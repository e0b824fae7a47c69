"""A results file that grows line by line as runs end: no partial lines, and one line for each run.

The line of a run that has ended anew, after a retry or a further message, is appended too, and the
newest line counts: a crash loses nothing. `settle` then removes the older lines.
"""

import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Self

from stepfleet.orchestrator.cli.results.layout import Layout
from stepfleet.orchestrator.cli.results.lines import Mark, is_begun, mark_of, to_line
from stepfleet.orchestrator.cli.results.places import beside, is_empty, not_writable, open_to_append
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.records.run.results import AgentRunResult


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

    Raises `ConfigurationError` for a line that is no result.
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
    """Yield mark and length of each whole line; one that a crash has cut is left out.

    Raises `ConfigurationError` for a line, also one without its end, that is no result.
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
                    f"--out {path}: line {number} is no result of format {form}; "
                    "name another file, so that the two are not mixed"
                )
                raise ConfigurationError(msg)
