"""Collects a batch's results: into a file that grows, or a whole one, or on standard output."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, TypeVar

from stepfleet.orchestrator.batches.check import BatchCheck
from stepfleet.orchestrator.cli.results.layout import Layout, ResultOptions
from stepfleet.orchestrator.cli.results.lines import to_line
from stepfleet.orchestrator.cli.results.places import FullDiskError, is_empty, replacing
from stepfleet.orchestrator.cli.results.result_file import ResultFile, runs_in
from stepfleet.orchestrator.cli.terminal.format import count
from stepfleet.orchestrator.cli.terminal.output import bytes_out, every_second
from stepfleet.orchestrator.client.batch import AsyncBatch
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.store.batches.batches import run_id_of

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
