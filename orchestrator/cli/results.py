"""Which results a command writes and in which form, and how they are collected from a batch."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Annotated, Any, Literal, TypeVar

import typer

from stepfleet.orchestrator.batches.check import BatchCheck
from stepfleet.orchestrator.batches.files.tables import require_arrow, select
from stepfleet.orchestrator.cli.result_file import (
    FullDiskError,
    Layout,
    ResultFile,
    is_empty,
    replacing,
    runs_in,
    to_line,
)
from stepfleet.orchestrator.cli.terminal import bytes_out, count, every_second
from stepfleet.orchestrator.client.batch import AsyncBatch
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.records.batch import BatchFormat
from stepfleet.orchestrator.store.batches.batches import run_id_of

TABLES = {".csv": "csv", ".parquet": "parquet"}
_NO_TABLES = {".tsv", ".xls", ".xlsx", ".feather", ".arrow"}
STDOUT = Path("-")
SLIM_COLUMNS = (
    "id,run_id,status,stop_reason,output,structured.*,error,last_error.message,cost_usd,end_time"
)


@dataclass(frozen=True, slots=True)
class ResultOptions:
    """The options `--out`, `--format`, `--fields`, `--slim` and `--ordered` as they are given."""

    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Results file: .csv, .parquet, or else JSON lines."),
    ] = None
    output_format: Annotated[
        Literal["auto", "jsonl", "csv", "parquet", "stepfleet", "openai"],
        typer.Option(
            "--format", help="Format of results; auto goes by the file's name, lines by the input."
        ),
    ] = "auto"
    fields: Annotated[
        str | None,
        typer.Option("--fields", metavar="NAMES", help="These fields: id,structured.*,cost_usd."),
    ] = None
    slim: Annotated[
        bool, typer.Option("--slim", help="Short lines: the answer, stop reason, error and cost.")
    ] = False
    ordered: Annotated[
        bool, typer.Option("--ordered", help="Results in the order of the input.")
    ] = False

    @property
    def form(self) -> dict[str, Any]:
        """The options that are given, without the file."""
        unset = ResultOptions()
        names = ("output_format", "fields", "slim", "ordered")
        return {one: given for one in names if (given := getattr(self, one)) != getattr(unset, one)}

    @property
    def words(self) -> list[str]:
        """The options that are given, without the file, as words of a command."""
        found = []
        for name, value in self.form.items():
            found.append(f"--{name.removeprefix('output_')}")
            if value is not True:
                found.append(value)
        return found

    def check_new(self) -> None:
        """Raise `ConfigurationError` where a file to be written as a whole holds something."""
        named = self.out is not None and self.out.suffix.lower() in TABLES
        is_whole = named or self.output_format in TABLES.values() or self.fields is not None
        if is_whole and self.out is not None and not is_empty(self.out):
            msg = (
                f"--out {self.out} holds something already; name another file, or replace it when "
                f"the batch has ended: stepfleet results ID --out {self.out}"
            )
            raise ConfigurationError(msg)

    def check(self) -> None:
        """Raise `ConfigurationError`, with the fix, where options contradict, or pyarrow lacks."""
        suffix = self.out.suffix.lower() if self.out else ""
        named, given = TABLES.get(suffix), self.output_format
        if self.out == STDOUT:
            msg = (
                "--out -: a batch that runs writes its results into a file; name one, or print "
                "them when it has ended: stepfleet results ID"
            )
            raise ConfigurationError(msg)
        if self.fields is not None and self.slim:
            raise ConfigurationError("--slim and --fields: leave one out; --fields lists its own")
        if given == "openai" and (self.fields is not None or self.slim):
            msg = "--format openai has fixed fields: leave out --fields and --slim, or the format"
            raise ConfigurationError(msg)
        if suffix in _NO_TABLES:
            msg = f"--out {self.out}: tables are written as .csv or .parquet; name such a file"
            raise ConfigurationError(msg)
        if named and given not in {"auto", named}:
            msg = f"--out {self.out} is named as {named}, --format says {given}; leave one out"
            raise ConfigurationError(msg)
        if "parquet" in {named, given}:
            require_arrow()
            if self.out is None:
                raise ConfigurationError("--format parquet is binary: name a file with --out")
        select(self.fields)

    def layout(self, batch: BatchFormat) -> Layout:
        """Return the form for results of a batch whose input has the format `batch`."""
        suffix = self.out.suffix.lower() if self.out else ""
        kind = TABLES.get(suffix, self.output_format)
        if kind in {"csv", "parquet"}:
            names = SLIM_COLUMNS if self.slim else self.fields
            return Layout("csv" if kind == "csv" else "parquet", names)
        if self.fields is not None:
            return Layout("fields", self.fields)
        if self.slim:
            return Layout("slim")
        by_batch = batch == "openai" and kind in {"auto", "jsonl"}
        return Layout("openai" if kind == "openai" or by_batch else "full")


_SPACE_SECONDS = 1.0
T = TypeVar("T")


async def collect_as_they_end(
    batch: AsyncBatch, out: Path, layout: Layout, report: Callable[[str], None], *, ordered: bool
) -> None:
    """Append each run's line as it ends, until all have ended; then the file is what the batch is.

    Lines that it has already are kept. With `ordered` the file is in the order of the input. A
    full disk is waited for: `report` gets it, and an empty text when there is room again.
    Raises `ConfigurationError` where the file has results of another batch; it stays as it is.
    """
    with ResultFile(out, layout) as file:
        if file.ends:
            await to_its_end(partial(_check_same, batch.id, batch.run_ids(), out, file.ends))
        async for result in batch.results(known=file.ends):
            try:
                file.add(result)
            except FullDiskError:
                await when_there_is_space(partial(to_its_end, partial(file.add, result)), report)
        order = list(batch.run_ids()) if ordered else []  # for each attempt
        await when_there_is_space(partial(to_its_end, partial(file.settle, order)), report)


async def check_before(results: ResultOptions, look: Callable[[], Awaitable[BatchCheck]]) -> None:
    """Raise `ConfigurationError` where `--out` has results of another batch than this one.

    `look` looks at a batch that is to be submitted. The file stays as it is.
    """
    out = results.out
    if out is None or is_empty(out):
        return
    batch = await look()
    layout = results.layout(batch.format)
    if layout.grows:
        own = (run_id_of(batch.batch_id, row) for row in range(batch.lines))
        runs = await asyncio.to_thread(runs_in, out, layout)
        await asyncio.to_thread(_check_same, batch.batch_id, own, out, runs)


def _check_same(batch_id: str, own: Iterable[str], out: Path, runs: Collection[str]) -> None:
    """Raise `ConfigurationError` where one of the file's `runs` is none of the batch's `own`."""
    known = set(own)
    other = [run_id for run_id in runs if run_id not in known]
    if other:
        msg = (
            f"--out {out}: {count(len(other))} of its {count(len(runs))} lines are of another "
            f"batch than {batch_id} (run {other[0]}); nothing was written. Name another file"
        )
        raise ConfigurationError(msg)


async def to_its_end(work: Callable[[], T]) -> T:
    """Return what `work` returns, done in a thread; a cancel waits until it is done.

    The thread would go on with a file that is closed, or alongside the next that writes it.
    """
    working = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait([working])
        raise


async def when_there_is_space(
    write: Callable[[], Awaitable[T]], report: Callable[[str], None]
) -> T:
    """Return what `write` returns, tried again for as long as the disk is full."""
    reported = False
    while True:
        try:
            found = await write()
        except FullDiskError as error:
            report(error.message)
            reported = True
            await asyncio.sleep(_SPACE_SECONDS)
            continue
        if reported:
            report("")
        return found


async def collect(
    batch: AsyncBatch, options: ResultOptions, layout: Layout, *, follow: bool, failed: bool
) -> int:
    """Write results as a whole, and return how many; a file appears when it is complete."""
    with _sink(options.out) as file:
        if layout.is_table:
            # Always in the order of the input: it is written when all rows are there.
            with await batch.table(layout.fields, follow=follow, failed=failed) as table:
                write = table.write_csv if layout.kind == "csv" else table.write_parquet
                await to_its_end(partial(write, file))
                return table.count
        written = 0
        report = every_second(lambda lines: f"{count(lines)} results written so far")
        async for result in batch.results(ordered=options.ordered, follow=follow, failed=failed):
            file.write(to_line(result, layout))
            written += 1
            if options.out is None:
                file.flush()
            else:
                report(written)
        return written


@contextlib.contextmanager
def _sink(out: Path | None) -> Iterator[IO[bytes]]:
    if out is not None:
        with replacing(out) as file:
            yield file
        return
    shown = bytes_out()
    yield shown
    shown.flush()
