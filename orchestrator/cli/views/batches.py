"""What is said about batches: submit one, its progress, its results."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.orchestrator.cli.results.follow import follow, say_skipped
from stepfleet.orchestrator.cli.results.input_file import default_agent, kind_of
from stepfleet.orchestrator.cli.results.result_file import (
    Nowhere,
    ResultFile,
    Sink,
    StandardOutput,
    check_writable,
    replacing,
)
from stepfleet.orchestrator.cli.setup.with_fleet import with_fleet
from stepfleet.orchestrator.cli.terminal import tables
from stepfleet.orchestrator.cli.terminal.exit_codes import COMPLETED, INTERRUPTED, SOME_FAILED
from stepfleet.orchestrator.cli.terminal.output import notice, print_json, screen
from stepfleet.orchestrator.cli.terminal.progress import Display
from stepfleet.orchestrator.cli.terminal.signals import Interrupts, until_asked
from stepfleet.orchestrator.cli.views.fleet import fleet_lines
from stepfleet.orchestrator.client.fleet import AsyncBatch, AsyncFleet
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.records.batch import BatchProgress


@dataclass(frozen=True, slots=True)
class Submission:
    """What the user asked `submit` for."""

    file: Path
    agent: str | None
    agents: str | None
    data: Path
    out: Path | None
    wait: bool
    idempotency_key: str | None
    skip_invalid: bool
    output_format: str
    json: bool


def submit_file(asked: Submission) -> int:
    """Submit a file's batch and print its id; with `wait`, follow it to its end.

    Returns the exit code. Raises `AgentException` with the fix.
    """
    if asked.out is not None:
        if not asked.wait:
            raise ConfigurationError("--out needs --wait; later: stepfleet results ID --out FILE")
        check_writable(asked.out)
    agents = load_agents(asked.agents) if asked.agents else {}
    agent = default_agent(agents, asked.agent) if agents else asked.agent

    async def submit(fleet: AsyncFleet) -> int:
        batch = await fleet.submit_batch(
            asked.file,
            agent,
            agents=agents or None,
            idempotency_key=asked.idempotency_key,
            skip_invalid=asked.skip_invalid,
            name=asked.file.name,
        )
        say_skipped(batch)
        if not asked.wait:
            if asked.json:
                print_json((await batch.progress()).to_dict())
            else:
                screen().print(batch.id)
            return COMPLETED
        notice(f"Batch {batch.id}")
        return await _to_its_end(batch, asked.out, asked.output_format, json=asked.json)

    return with_fleet(asked.data, submit, warn=True, waits=asked.wait)


def watch_batch(batch_id: str, data: Path, *, json: bool) -> int:
    """Show a batch's progress until it has ended; return the exit code."""

    async def watch(fleet: AsyncFleet) -> int:
        return await _to_its_end(await fleet.batches.get(batch_id), None, "auto", json=json)

    return with_fleet(data, watch, waits=True)


def show_status(batch_id: str | None, data: Path, *, json: bool) -> None:
    """Print one batch, or the fleet and its newest batches."""

    async def show(fleet: AsyncFleet) -> None:
        if batch_id is not None:
            progress = await (await fleet.batches.get(batch_id)).progress()
            if json:
                print_json(progress.to_dict())
            else:
                screen().print(tables.summary(progress))
            return
        overview, batches = await fleet.overview(), await fleet.batches.newest()
        if json:
            listed = [one.to_dict() for one in batches]
            print_json({"fleet": overview.to_dict(), "batches": listed})
            return
        screen().print(fleet_lines(overview))
        screen().print(tables.batch_list(batches))

    with_fleet(data, show)


def write_results(
    batch_id: str,
    data: Path,
    out: Path | None,
    *,
    failed: bool,
    ordered: bool,
    wait: bool,
    output_format: str,
) -> int:
    """Write the results of a batch's ended runs; with `wait`, of all its runs as they end.

    Returns the exit code: 1 where results of ended runs are not there any more.
    """
    if out is not None:
        check_writable(out)

    async def write(fleet: AsyncFleet) -> int:
        batch = await fleet.batches.get(batch_id)
        progress = await batch.progress()
        written = 0
        with _sink(out, output_format, progress) as sink:
            async for result in batch.results(ordered=ordered, follow=wait, failed=failed):
                sink.add(result)
                written += 1
        still = f"; {progress.open} runs are still open" if progress.open and not wait else ""
        notice(f"{written} results{f' in {out}' if out else ''}{still}")
        ended = progress.done - progress.completed if failed else progress.done
        if written >= ended:
            return COMPLETED
        notice(f"{ended - written} results are past retention, or were removed")
        return SOME_FAILED

    return with_fleet(data, write, waits=wait)


@contextlib.contextmanager
def _sink(out: Path | None, output_format: str, progress: BatchProgress) -> Iterator[Sink]:
    kind = kind_of(output_format, progress.format)
    if out is None:
        yield StandardOutput(kind)
        return
    with replacing(out, kind) as file:
        yield file


async def _to_its_end(
    batch: AsyncBatch, out: Path | None, output_format: str, *, json: bool
) -> int:
    """Follow a batch; Ctrl-C leaves it running and says how to see it again."""
    started = time.monotonic()
    interrupts = Interrupts()
    with contextlib.ExitStack() as stack:
        stack.enter_context(interrupts.heard())
        kind = kind_of(output_format, (await batch.progress()).format)
        sink: Sink = stack.enter_context(ResultFile(out, kind)) if out else Nowhere()
        display = stack.enter_context(Display())
        interrupts.before_leaving_at_once(display.leave)
        progress = await until_asked(follow(batch, sink, display), interrupts.asked)
    if progress is None:
        notice(f"The batch goes on without you: stepfleet watch {batch.id}")
        return INTERRUPTED
    if json:
        print_json(progress.to_dict())
    else:
        screen().print(tables.summary(progress, time.monotonic() - started))
    if progress.submission_stalled:
        notice(
            f"Submission incomplete: {progress.submitted} of {progress.total} lines, and nobody "
            "goes on with it. Submit the same file again for the rest, or "
            f"stepfleet cancel --batch {progress.batch_id}"
        )
    return COMPLETED if progress.ok else SOME_FAILED
