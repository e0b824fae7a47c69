"""Follows a batch to its end: results to their sink as they finish, progress to the display."""

import asyncio
from pathlib import Path

from stepfleet.orchestrator.cli.results.input_file import kind_of
from stepfleet.orchestrator.cli.results.result_file import ResultFile
from stepfleet.orchestrator.cli.terminal.output import notice
from stepfleet.orchestrator.cli.terminal.progress import LIVE_SECONDS, Display
from stepfleet.orchestrator.client.fleet import AsyncBatch
from stepfleet.orchestrator.records.batch import BatchProgress


async def follow(
    batch: AsyncBatch, out: Path | None, output_format: str, display: Display
) -> BatchProgress:
    """Return the progress of the ended batch, after its results are in the file `out`, if any."""
    watching = asyncio.create_task(_watch(batch, display))
    try:
        if out is not None:
            kind = kind_of(output_format, (await batch.progress()).format)
            with ResultFile(out, kind) as file:
                async for result in batch.results():
                    file.add(result)
            watching.cancel()
        await asyncio.wait([watching])
        if not watching.cancelled():
            watching.result()
    finally:
        watching.cancel()
    progress = await batch.progress()
    display.update(progress, last=True)
    return progress


def print_skipped(batch: AsyncBatch) -> None:
    """Print the lines that were left out of a batch as it was submitted."""
    if not batch.skipped_count:
        return
    notice(f"{batch.skipped_count} lines were left out:")
    for problem in batch.skipped:
        notice(f"  {problem}")
    if batch.skipped_count > len(batch.skipped):
        notice(f"  and {batch.skipped_count - len(batch.skipped)} more")


async def _watch(batch: AsyncBatch, display: Display) -> None:
    while True:
        progress = await batch.progress()
        display.update(progress)
        if progress.over:
            return
        await asyncio.sleep(LIVE_SECONDS)
