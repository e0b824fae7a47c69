"""Collects a batch's results: into a file that grows, or a whole one, or on standard output."""

import asyncio
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from stepfleet.orchestrator.cli.results.layout import Layout, ResultOptions
from stepfleet.orchestrator.cli.results.lines import to_line
from stepfleet.orchestrator.cli.results.places import replacing
from stepfleet.orchestrator.cli.results.result_file import ResultFile
from stepfleet.orchestrator.client.batch import AsyncBatch


async def collect_as_they_end(
    batch: AsyncBatch, out: Path, layout: Layout, *, ordered: bool
) -> None:
    """Append each run's line as it ends, until all have ended; then the file is what the batch is.

    Lines that it has already are kept. With `ordered` the file is in the order of the input.
    """
    with ResultFile(out, layout) as file:
        async for result in batch.results(known=file.ends):
            file.add(result)
        await asyncio.to_thread(file.settle, batch.run_ids() if ordered else ())


async def collect(
    batch: AsyncBatch, options: ResultOptions, layout: Layout, *, follow: bool, failed: bool
) -> int:
    """Write results as a whole, and return how many; a file appears when it is complete."""
    with _sink(options.out) as file:
        if layout.is_table:
            # Always in the order of the input: it is written when all rows are there.
            with await batch.table(layout.fields, follow=follow, failed=failed) as table:
                write = table.write_csv if layout.kind == "csv" else table.write_parquet
                await asyncio.to_thread(write, file)
                return table.count
        written = 0
        async for result in batch.results(ordered=options.ordered, follow=follow, failed=failed):
            file.write(to_line(result, layout))
            written += 1
            if options.out is None:
                file.flush()
        return written


@contextlib.contextmanager
def _sink(out: Path | None) -> Iterator[IO[bytes]]:
    if out is not None:
        with replacing(out) as file:
            yield file
        return
    yield sys.stdout.buffer
    sys.stdout.buffer.flush()
