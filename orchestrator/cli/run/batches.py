"""`stepfleet submit`, `watch` and `results`: submits a batch, follows it, writes its results."""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.orchestrator.batches.failures import Failures
from stepfleet.orchestrator.cli.options import data_option
from stepfleet.orchestrator.cli.results.collecting import (
    check_before,
    collect,
    collect_as_they_end,
    when_there_is_space,
)
from stepfleet.orchestrator.cli.results.input_file import InputForm, default_agent
from stepfleet.orchestrator.cli.results.layout import ResultOptions
from stepfleet.orchestrator.cli.results.places import check_apart, check_writable
from stepfleet.orchestrator.cli.results.result_file import check_results
from stepfleet.orchestrator.cli.run.locks import only_writer
from stepfleet.orchestrator.cli.run.notes import new_key
from stepfleet.orchestrator.cli.setup.model_check import check_calls
from stepfleet.orchestrator.cli.setup.with_fleet import with_fleet
from stepfleet.orchestrator.cli.terminal.exit_codes import COMPLETED, INTERRUPTED, SOME_FAILED
from stepfleet.orchestrator.cli.terminal.format import count
from stepfleet.orchestrator.cli.terminal.output import (
    every_second,
    notice,
    print_either,
    print_json,
    print_text,
)
from stepfleet.orchestrator.cli.terminal.progress import LIVE_SECONDS, Display
from stepfleet.orchestrator.cli.terminal.signals import Interrupts, until_interrupted
from stepfleet.orchestrator.cli.views.batches import summary
from stepfleet.orchestrator.cli.views.failures import causes_of, with_causes
from stepfleet.orchestrator.client.fleet import AsyncBatch, AsyncFleet
from stepfleet.orchestrator.errors import ConfigurationError, StoreError
from stepfleet.orchestrator.records.batch import BatchProgress
from stepfleet.orchestrator.settings.settings import load_settings

_ASK_SECONDS = 5.0
HELD_LOG = "stepfleet.orchestrator.batches.results"


@dataclass(frozen=True, slots=True)
class Ended:
    """A batch that was followed to its end."""

    progress: BatchProgress
    failures: Failures


def submit_file(
    file: Path,
    data: Path,
    *,
    form: InputForm,
    agents: str | None,
    agent: str | None,
    results: ResultOptions,
    wait: bool,
    idempotency_key: str | None,
    skip_invalid: bool,
    json: bool,
    again: bool = False,
    check: bool = True,
) -> int:
    """Submit a file's batch and print its id; with `wait`, follow it to its end.

    A file that has a batch is not submitted once more, except `again`. Returns the exit code.
    Raises `AgentException` with the fix.
    """
    if again and idempotency_key is not None:
        raise ConfigurationError("--again makes a key of its own; leave --idempotency-key out")
    results.check()
    if results.out is not None:
        _check_out(results.out, file, results, wait=wait)
    known = load_agents(agents) if agents else {}
    default = default_agent(known, agent) if known else agent
    if check and default in known:
        # The workers' keys are theirs: only a key that is here is tried.
        asyncio.run(check_calls([known[default].config], os.environ, notice, own_keys=True))

    lines: dict[str, Any] = {
        "agents": known or None,
        "idempotency_key": new_key("submit") if again else idempotency_key,
        **form.for_batch(),
    }

    async def submit(fleet: AsyncFleet) -> int:
        if not form.only_new:  # that batch is found by its file
            await check_before(results, partial(fleet.batches.check, file, default, **lines))
        say = every_second(lambda runs: f"{count(runs)} runs submitted so far")
        named: dict[str, Any] = {
            "name": file.name,
            "skip_invalid": skip_invalid,
            "on_progress": say,
        }
        batch = await fleet.submit_batch(file, default, **named, **lines)
        print_skipped(batch)
        if not batch.is_new:
            notice(already_there(await batch.progress()))
        if wait:
            notice(f"Batch {batch.id}")
            return await _to_its_end(fleet, batch, results, json=json, agents=agents)
        if json:
            print_json({**(await batch.progress()).to_dict(), "is_new": batch.is_new})
        else:
            print_text(batch.id)
        return COMPLETED

    with only_writer(results.out):
        return with_fleet(data, submit, warn=True, waits=wait)


def _check_out(out: Path, file: Path, results: ResultOptions, *, wait: bool) -> None:
    """Raise `ConfigurationError` where `out` cannot take results, before anything is paid."""
    if not wait:
        raise ConfigurationError("--out needs --wait; later: stepfleet results ID --out FILE")
    check_apart(out, file)
    check_writable(out)
    results.check_new()
    forms = (results.layout("stepfleet"), results.layout("openai"))
    check_results(out, [one for one in forms if one.grows])


def already_there(progress: BatchProgress) -> str:
    """Return what a submission says that found its batch there. Pure."""
    not_ok = progress.done - progress.completed
    state = "cancelled" if progress.cancel_requested else f"{progress.open} open"
    return (
        f"Nothing was submitted: batch {progress.batch_id} has had these lines since "
        f"{progress.created:%Y-%m-%d %H:%M} UTC ({progress.done} of {progress.total} ended, "
        f"{not_ok} not completed, {state}). Results: stepfleet results {progress.batch_id}"
        f"{data_option()}. "
        "A new batch, paid again: --again"
    )


def watch_batch(batch_id: str, data: Path, *, json: bool) -> int:
    """Show a batch's progress until it has ended; return the exit code."""

    async def watch(fleet: AsyncFleet) -> int:
        batch = await fleet.batches.get(batch_id)
        if (await batch.progress()).ended:
            results = f"stepfleet results {batch_id}{data_option()}"
            notice(f"Batch {batch_id} has ended; its results: {results}")
        return await _to_its_end(fleet, batch, ResultOptions(), json=json)

    return with_fleet(data, watch, waits=True)


def write_results(
    batch_id: str, data: Path, results: ResultOptions, *, failed: bool, wait: bool
) -> int:
    """Write the results of a batch's ended runs; with `wait`, of all its runs as they end.

    Returns the exit code: 1 where results of ended runs are no longer stored.
    """
    results.check()
    if results.out is not None:
        check_writable(results.out)

    async def write(fleet: AsyncFleet) -> int:
        batch = await fleet.batches.get(batch_id)
        progress = await batch.progress()
        layout = results.layout(progress.format)
        written = await collect(batch, results, layout, follow=wait, failed=failed)
        still = f"; {progress.open} runs are still open" if progress.open and not wait else ""
        notice(f"{written} results{f' in {results.out}' if results.out else ''}{still}")
        ended = progress.done - progress.completed if failed else progress.done
        if written >= ended:
            return COMPLETED
        notice(f"{ended - written} results are past retention or were removed")
        return SOME_FAILED

    with only_writer(results.out):
        return with_fleet(data, write, waits=wait)


async def _to_its_end(
    fleet: AsyncFleet,
    batch: AsyncBatch,
    results: ResultOptions,
    *,
    json: bool,
    agents: str | None = None,
) -> int:
    """Follow a batch. Ctrl-C leaves it running and prints how to watch it again.

    `agents` is what workers are to be started with where there are none.
    """
    started = time.monotonic()
    interrupts = Interrupts()
    with interrupts.handled(), Display(advice=_advice(agents)) as display:
        interrupts.before_exit(display.leave)
        following = follow(fleet, batch, results, display)
        ended = await until_interrupted(following, interrupts)
    if ended is None:
        notice(f"The batch continues in the background: stepfleet watch {batch.id}{data_option()}")
        return INTERRUPTED
    progress = ended.progress
    print_ended(ended, time.monotonic() - started, json=json)
    if progress.held:
        notice(f"The batch is {progress.held_text}")
    if progress.submission_stalled:
        notice(
            f"Submission incomplete: {progress.submitted} of {progress.total} lines, and no "
            "client is submitting the rest. Submit the same file again to complete it, or "
            f"stepfleet cancel --batch {progress.batch_id}{data_option()}"
        )
    return COMPLETED if progress.ok else SOME_FAILED


def _advice(agents: str | None) -> Callable[[str], str]:
    """Return what turns advice on workers into a command that works in this folder."""
    # A private server ends with its last client: a worker is no reason for it to stay.
    command = "worker" if load_settings().redis_url else "up"

    def advice(reason: str) -> str:
        if " --queue " not in reason:
            reason = reason.replace("stepfleet worker", f"stepfleet {command}")
        return reason.replace("MODULE", agents or "MODULE")

    return advice


async def follow(
    fleet: AsyncFleet, batch: AsyncBatch, results: ResultOptions, display: Display
) -> Ended:
    """Return how the batch ended, after its results are in their file, if any.

    Also of one that is held by equal errors, with the results so far.
    """
    logging.getLogger(HELD_LOG).setLevel(logging.ERROR)  # the display shows it
    await batch.on_standstill(display.stands_still)
    report = partial(display.stands_still, what="Results wait, the runs go on")
    watching = asyncio.create_task(_watch(batch, display))
    counting = asyncio.create_task(_count_failures(batch, display))
    asking = asyncio.create_task(_count_asks(fleet, batch, display))
    try:
        layout = results.layout((await batch.progress()).format)
        if results.out is not None and layout.grows:
            await collect_as_they_end(batch, results.out, layout, report, ordered=results.ordered)
            watching.cancel()
        await asyncio.wait([watching])
        if not watching.cancelled():
            watching.result()
        if results.out is not None and not layout.grows:
            await when_there_is_space(
                partial(collect, batch, results, layout, follow=False, failed=False), report
            )
    finally:
        watching.cancel()
        counting.cancel()
        asking.cancel()
    progress = await batch.progress()
    display.update(progress, last=True)
    return Ended(progress, await causes_of(batch, progress))


def print_ended(ended: Ended, seconds: float, *, json: bool) -> None:
    """Print how a batch ended after so many seconds."""
    print_either(
        ended,
        lambda one: summary(one.progress, one.failures, wall_seconds=seconds),
        json=json,
        as_data=lambda one: with_causes(one.progress, one.failures),
    )


def print_skipped(batch: AsyncBatch) -> None:
    """Print how many rows were added to a batch, and the lines that were left out of it."""
    if batch.added is not None:
        notice(f"{batch.added:,} new rows; they are in batch {batch.id} of this file")
    if not batch.skipped_count:
        return
    notice(f"{batch.skipped_count} lines were left out:")
    for problem in batch.skipped:
        notice(f"  {problem}")
    if batch.skipped_count > len(batch.skipped):
        notice(f"  and {batch.skipped_count - len(batch.skipped)} more")


async def _count_failures(batch: AsyncBatch, display: Display) -> None:
    """Count failures for a live display as they come; the outcome is counted anew."""
    if display.is_live:
        with contextlib.suppress(StoreError):  # whoever watches the progress reports it
            async for result in batch.results(failed=True):
                display.count(result)


async def _count_asks(fleet: AsyncFleet, batch: AsyncBatch, display: Display) -> None:
    """Count calls that wait for people now and then: when these end is up to them."""
    while True:
        with contextlib.suppress(StoreError):  # whoever watches the progress reports it
            display.wait_for_people(await fleet.approvals.of_batch(batch.id))
        await asyncio.sleep(_ASK_SECONDS)


async def _watch(batch: AsyncBatch, display: Display) -> None:
    async for progress in batch.watch(LIVE_SECONDS):
        display.update(progress)
