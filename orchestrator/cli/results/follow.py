"""Follows a batch to its end: results to their sink as they finish, progress to the display."""

import asyncio

from stepfleet.orchestrator.cli.results.result_file import Nowhere, Sink
from stepfleet.orchestrator.cli.terminal.output import notice
from stepfleet.orchestrator.cli.terminal.progress import LIVE_SECONDS, Display
from stepfleet.orchestrator.client.fleet import AsyncBatch
from stepfleet.orchestrator.records.batch import BatchProgress


async def follow(
    batch: AsyncBatch, sink: Sink, display: Display, *, every: float = LIVE_SECONDS
) -> BatchProgress:
    """Return the progress of the ended batch, after every result is in the sink."""
    watching = asyncio.create_task(_watch(batch, display, every))
    try:
        if not isinstance(sink, Nowhere):
            async for result in batch.results():
                sink.add(result)
            watching.cancel()
        await asyncio.wait([watching])
        if not watching.cancelled():
            watching.result()
    finally:
        watching.cancel()
    progress = await batch.progress()
    display.update(progress, last=True)
    return progress


def say_skipped(batch: AsyncBatch) -> None:
    """Say which lines were left out of a batch as it was submitted."""
    if not batch.skipped_count:
        return
    notice(f"{batch.skipped_count} lines were left out:")
    for problem in batch.skipped:
        notice(f"  {problem}")
    if batch.skipped_count > len(batch.skipped):
        notice(f"  and {batch.skipped_count - len(batch.skipped)} more")


async def _watch(batch: AsyncBatch, display: Display, every: float) -> None:
    while True:
        progress = await batch.progress()
        display.update(progress)
        if progress.over:
            return
        await asyncio.sleep(every)
