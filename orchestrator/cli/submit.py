"""`stepfleet submit`, `watch` and `results`: submits a batch, follows it, writes its results."""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from stepfleet.orchestrator.batches.failures import Failures
from stepfleet.orchestrator.cli import options
from stepfleet.orchestrator.cli.batches import causes_of, summary, with_causes
from stepfleet.orchestrator.cli.fleet import with_fleet
from stepfleet.orchestrator.cli.inputs import FileOptions, agent_of, agents_of, overrides_of
from stepfleet.orchestrator.cli.model_check import check_calls
from stepfleet.orchestrator.cli.notes import new_key, only_writer
from stepfleet.orchestrator.cli.options import COMPLETED, INTERRUPTED, SOME_FAILED, data_option
from stepfleet.orchestrator.cli.progress import LIVE_SECONDS, Display
from stepfleet.orchestrator.cli.result_file import check_apart, check_results, check_writable
from stepfleet.orchestrator.cli.results import (
    STDOUT,
    ResultOptions,
    check_before,
    collect,
    collect_as_they_end,
    when_there_is_space,
)
from stepfleet.orchestrator.cli.signals import Interrupts, until_interrupted
from stepfleet.orchestrator.cli.terminal import (
    count,
    every_second,
    notice,
    print_either,
    print_json,
    print_text,
)
from stepfleet.orchestrator.client.fleet import AsyncBatch, AsyncFleet
from stepfleet.orchestrator.errors import ConfigurationError, StoreError
from stepfleet.orchestrator.records.batch import BatchProgress
from stepfleet.orchestrator.settings.settings import load_settings

_FOLLOWING = "With --after-batch"


@dataclass(frozen=True, slots=True)
class FollowingOptions:
    """The options of a batch that works on the results of another one."""

    text: Annotated[
        str | None,
        typer.Option(
            "--input",
            metavar="TEXT",
            help="With {output}, {input}, {id} of a run; of pages {outputs}, {count}.",
            rich_help_panel=_FOLLOWING,
        ),
    ] = None
    page: Annotated[
        int | None,
        typer.Option(
            "--page",
            help="Rows of the batch for each run; without it, one.",
            rich_help_panel=_FOLLOWING,
        ),
    ] = None
    until_one: Annotated[
        bool,
        typer.Option(
            "--until-one",
            help="Take pages of results until one run is left.",
            rich_help_panel=_FOLLOWING,
        ),
    ] = False
    after_failed: Annotated[
        str,
        typer.Option(
            "--after-failed",
            metavar="[skip|stop]",
            help="Leave failed runs out, or begin nothing.",
            rich_help_panel=_FOLLOWING,
        ),
    ] = "skip"
    name: Annotated[
        str | None,
        typer.Option("--name", help="The new batch's name.", rich_help_panel=_FOLLOWING),
    ] = None
    raised: Annotated[
        list[str] | None,
        typer.Option(
            "--raise",
            metavar="FIELD=VALUE",
            help="Change a limit: max_steps=20.",
            rich_help_panel=_FOLLOWING,
        ),
    ] = None


_OF_BOTH = {"after_batch", "agent", "agents", "tenant", "priority", "json", "data"}
_ASK_SECONDS = 5.0
HELD_LOG = "stepfleet.orchestrator.batches.results"


def submit(
    context: typer.Context,
    file: Annotated[Path | None, typer.Argument(metavar="[FILE]", help=options.INPUTS)] = None,
    *,
    after_batch: Annotated[
        str | None,
        typer.Option(
            "--after-batch",
            metavar="ID",
            help="Work on this batch's results when it has ended; no FILE.",
        ),
    ] = None,
    following: FollowingOptions,
    agent: options.AgentName = None,
    agents: options.MaybeAgentsRef = None,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the batch to its end.")] = False,
    results: ResultOptions,
    idempotency_key: Annotated[
        str | None,
        typer.Option("--idempotency-key", help="The same key returns the same batch again."),
    ] = None,
    lines: FileOptions,
    after: Annotated[
        list[str] | None,
        typer.Option("--after", metavar="RUN", help="Begin when this run has ended; repeatable."),
    ] = None,
    json: options.Json = False,
    again: options.Again = False,
    no_check: options.NoCheck = False,
    data: options.Data = options.DATA_FOLDER,
) -> int:
    """Submit a file of inputs to a fleet, and print the batch's id.

    A file that was submitted with the same agents has its batch: only --again makes another one.
    With --after-batch the new batch works on the results of another one.
    """
    _check_given(context)
    if after_batch is not None:
        of_all: Any = {"tenant": lines.tenant, "priority": lines.priority}
        named: Any = {"agent": agent, "agents": agents, "json": json, "data": data}
        return then(after_batch, following=following, **of_all, **named)
    if file is None:
        raise ConfigurationError("name a FILE of inputs, or --after-batch ID")
    key = _key(idempotency_key, again=again)
    results.check()
    if results.out is not None:
        _check_out(results.out, file, results, wait=wait)
    known, default = agents_of(agents, agent)
    if not no_check:
        # The workers' keys are theirs: only a key that is here is tried.
        tried = [known[default].config] if default in known else []
        asyncio.run(check_calls(tried, os.environ, notice, own_keys=True))
    given = {**asdict(lines), "agents": known or None, "idempotency_key": key}
    given["after"] = after or None
    skip_invalid = given.pop("skip_invalid")

    async def send(fleet: AsyncFleet) -> int:
        if not lines.only_new:  # that batch is found by its file
            await check_before(results, partial(fleet.batches.check, file, default, **given))
        say = every_second(lambda runs: f"{count(runs)} runs submitted so far")
        told: Any = {"skip_invalid": skip_invalid, "on_progress": say, "name": file.name}
        batch = await fleet.submit_batch(file, default, **told, **given)
        print_skipped(batch)
        if not batch.is_new:
            notice(already_there(await batch.progress()))
        if wait:
            notice(f"Batch {batch.id}")
            return await _to_its_end(fleet, batch, results, json=json, agents=agents)
        return await _print_batch(batch, json=json)

    with only_writer(results.out):
        return with_fleet(data, send, warn=True, waits=wait)


async def _print_batch(batch: AsyncBatch, *, json: bool) -> int:
    if json:
        print_json({**(await batch.progress()).to_dict(), "is_new": batch.is_new})
    else:
        print_text(batch.id)
    return COMPLETED


def _key(given: str | None, *, again: bool) -> str | None:
    if again and given is not None:
        raise ConfigurationError("--again makes a key of its own; leave --idempotency-key out")
    return new_key("submit") if again else given


def _check_given(context: typer.Context) -> None:
    """Raise `ConfigurationError` for options that do not go with, or without, `--after-batch`."""
    follows = context.params["after_batch"] is not None
    following = {one.name for one in fields(FollowingOptions)}
    fitting = following | _OF_BOTH
    for one in context.command.params:
        name, option = str(one.name), one.opts[0] if one.opts[0].startswith("-") else "FILE"
        source = context.get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE":
            continue
        if follows and name not in fitting:
            raise ConfigurationError(f"{option} does not go with --after-batch; leave it out")
        if not follows and name in following:
            raise ConfigurationError(f"{option} needs --after-batch ID")


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


def then(
    batch: options.BatchId,
    *,
    agent: options.AgentName = None,
    agents: options.MaybeAgentsRef = None,
    following: FollowingOptions,
    tenant: options.Tenant = None,
    priority: options.BatchPriority = None,
    json: options.Json = False,
    data: options.Data = options.DATA_FOLDER,
) -> int:
    """Have another batch work on a batch's results when that has ended, and print its id."""
    given: Any = {**asdict(following), "tenant": tenant, "priority": priority}
    text, raised = given.pop("text"), overrides_of(given.pop("raised"))
    by = agent_of(agents, agent)

    async def register(fleet: AsyncFleet) -> int:
        found = await fleet.batches.get(batch)
        made = await found.then(by, text, **given, **raised)
        if not made.is_new:
            notice(f"Batch {made.id} follows batch {batch} already")
        return await _print_batch(made, json=json)

    return with_fleet(data, register, warn=True)


def watch(
    batch: options.BatchId,
    json: options.Json = False,
    data: options.Data = options.DATA_FOLDER,
) -> int:
    """Show a batch's progress until it has ended."""

    async def follow_to_its_end(fleet: AsyncFleet) -> int:
        found = await fleet.batches.get(batch)
        if (await found.progress()).ended:
            results = f"stepfleet results {batch}{data_option()}"
            notice(f"Batch {batch} has ended; its results: {results}")
        return await _to_its_end(fleet, found, ResultOptions(), json=json)

    return with_fleet(data, follow_to_its_end, waits=True)


def results(
    batch: options.BatchId,
    *,
    failed: Annotated[bool, typer.Option("--failed", help="Only runs that did not complete.")] = (
        False
    ),
    wait: Annotated[bool, typer.Option("--wait", help="Wait until all runs have ended.")] = False,
    form: ResultOptions,
    data: options.Data = options.DATA_FOLDER,
) -> int:
    """Write the results of a batch to the screen or a file, which is replaced as a whole.

    Exit code 1: results of ended runs are no longer stored.
    """
    written = replace(form, out=None) if form.out == STDOUT else form
    written.check()
    if (out := written.out) is not None:
        check_writable(out)

    async def write(fleet: AsyncFleet) -> int:
        found = await fleet.batches.get(batch)
        progress = await found.progress()
        layout = written.layout(progress.format)
        number = await collect(found, written, layout, follow=wait, failed=failed)
        still = f"; {progress.open} runs are still open" if progress.open and not wait else ""
        notice(f"{number} results{f' in {out}' if out else ''}{still}")
        ended = progress.done - progress.completed if failed else progress.done
        if number >= ended:
            return COMPLETED
        notice(f"{ended - number} results are past retention or were removed")
        return SOME_FAILED

    with only_writer(out):
        return with_fleet(data, write, waits=wait)


@dataclass(frozen=True, slots=True)
class EndedBatch:
    """A batch that was followed to its end."""

    progress: BatchProgress
    failures: Failures


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
    """Return the advice on workers as a command that works in this folder."""
    # A private server ends with its last client: it does not stay for a worker.
    command = "worker" if load_settings().redis_url else "up"

    def advice(reason: str) -> str:
        if " --queue " not in reason:
            reason = reason.replace("stepfleet worker", f"stepfleet {command}")
        return reason.replace("MODULE", agents or "MODULE")

    return advice


async def follow(
    fleet: AsyncFleet, batch: AsyncBatch, results: ResultOptions, display: Display
) -> EndedBatch:
    """Return how the batch ended, after its results are in their file, if any.

    Also of one that is held by equal errors, with the results so far.
    """
    logging.getLogger(HELD_LOG).setLevel(logging.ERROR)  # the display shows it
    await batch.on_standstill(display.stands_still)
    report = partial(display.stands_still, what="Results wait, the runs continue")
    watching = asyncio.create_task(_watch(batch, display))
    counting = asyncio.create_task(_count_failures(batch, display))
    asking = asyncio.create_task(_count_approvals(fleet, batch, display))
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
    return EndedBatch(progress, await causes_of(batch, progress))


def print_ended(ended: EndedBatch, seconds: float, *, json: bool) -> None:
    """Print how a batch ended after `seconds`."""
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


async def _count_approvals(fleet: AsyncFleet, batch: AsyncBatch, display: Display) -> None:
    """Count calls that wait for people now and then: when these end is up to them."""
    while True:
        with contextlib.suppress(StoreError):  # whoever watches the progress reports it
            display.count_approvals(await fleet.approvals.of_batch(batch.id))
        await asyncio.sleep(_ASK_SECONDS)


async def _watch(batch: AsyncBatch, display: Display) -> None:
    async for progress in batch.watch(LIVE_SECONDS):
        display.update(progress)
