"""Collects a batch's results: into a file that grows, or a whole one, or on standard output."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, TypeVar

from stepfleet.orchestrator.cli.results.layout import Layout, ResultOptions
from stepfleet.orchestrator.cli.results.lines import to_line
from stepfleet.orchestrator.cli.results.places import FullDiskError, replacing
from stepfleet.orchestrator.cli.results.result_file import ResultFile
from stepfleet.orchestrator.cli.terminal.format import count
from stepfleet.orchestrator.cli.terminal.output import bytes_out, every_second
from stepfleet.orchestrator.client.batch import AsyncBatch
from stepfleet.orchestrator.errors import ConfigurationError

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
            await to_its_end(partial(_check_same, batch, file))
        async for result in batch.results(known=file.ends):
            try:
                file.add(result)
            except FullDiskError:
                await when_there_is_space(partial(to_its_end, partial(file.add, result)), report)
        order = list(batch.run_ids()) if ordered else []  # for each attempt
        await when_there_is_space(partial(to_its_end, partial(file.settle, order)), report)


def _check_same(batch: AsyncBatch, file: ResultFile) -> None:
    """Raise `ConfigurationError` where a run of the file is none of the batch."""
    own = set(batch.run_ids())
    other = [run_id for run_id in file.ends if run_id not in own]
    if other:
        msg = (
            f"--out {file.path}: {count(len(other))} of its {count(file.count)} lines are of "
            f"another batch than {batch.id} (run {other[0]}); nothing was written. Name another "
            f"file: stepfleet results {batch.id} --wait --out FILE"
        )
        raise ConfigurationError(msg)


async def to_its_end(work: Callable[[], T]) -> T:
    """Return what `work` returns, done in a thread; a cancel waits until it is done.

    The thread would go on with a file that is closed, or beside the next one that writes it.
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
