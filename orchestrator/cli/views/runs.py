"""Reads what `show`, `explain` and `events` print of one run."""

import asyncio
import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType

from stepfleet.orchestrator.cli.setup.with_fleet import with_fleet
from stepfleet.orchestrator.cli.terminal.output import print_json_line
from stepfleet.orchestrator.cli.views import listing
from stepfleet.orchestrator.cli.views.explain import (
    AskBelow,
    AwaitedTool,
    Explanation,
    awaited_tools,
    dated,
    explain,
    judged,
)
from stepfleet.orchestrator.cli.views.trace import trace
from stepfleet.orchestrator.client.fleet import AsyncFleet
from stepfleet.orchestrator.client.operations.asks_below import asks_below
from stepfleet.orchestrator.client.rendering import RunView
from stepfleet.orchestrator.client.runs import inputs_of
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.protocol.claim import Outage
from stepfleet.orchestrator.protocol.outage import circuit_id
from stepfleet.orchestrator.records.calls.answers import Ask, Awaited, awaited_by
from stepfleet.orchestrator.records.run.results import AgentRunResult
from stepfleet.orchestrator.records.run.summary import RunTree
from stepfleet.orchestrator.records.state import Lifecycle
from stepfleet.orchestrator.store.model_calls.circuits import ServiceOutage
from stepfleet.orchestrator.store.records.codec import load_outage
from stepfleet.orchestrator.store.runs.reading import StoredRun

_SHOWN = 10
"""Runs before a run that are named."""
Found = tuple[StoredRun, tuple[AwaitedTool, ...]]
Shown = tuple[Found, RunTree, tuple[Ask, ...]]


async def read_tree(named: str, batch: str | None, fleet: AsyncFleet) -> Shown:
    """Return the same as `read`, the runs below it, and the calls of those that wait for people."""
    found = await read(named, batch, fleet)
    tree = await fleet.runs.tree(found[0].run_id)
    return found, tree, await asks_below(tree, fleet.approvals)


async def read(named: str, batch: str | None, fleet: AsyncFleet) -> Found:
    """Return the run, or the run of that line, and the tools that it waits for."""
    run = await fleet.runs.show(await fleet.runs.find(named, batch))
    awaited = awaited_tools(run)
    if any(by and by.by_people for by in (awaited_by(one.queue) for one in awaited)):
        awaited = dated(awaited, await fleet.approvals.of_run(run.run_id))
    # The workers are needed only where a tool is awaited.
    return run, judged(awaited, (await fleet.overview()).workers) if awaited else ()


def as_data(found: Shown) -> dict[str, Any]:
    """Return the run's whole result, its messages and the runs below it as JSON-ready data."""
    (run, _), tree, _ = found
    messages = [message.to_dict() for message in run.state.messages]
    below = [one.to_dict() for one in tree.below]
    return {**run.result().to_dict(), "messages": messages, "below": below}


def picture(found: Shown, *, full: bool, debug: bool = False) -> RenderableType:
    """Return the run's trace and the runs below it, with `debug` the tracebacks of what failed."""
    (run, awaited), tree, asks = found
    shown = trace(run.result(), inputs_of(run), full=full, debug=debug, awaited=awaited)
    below = listing.below(tree, asks)
    return Group(shown, below) if below else shown


async def read_view(named: str, batch: str | None, fleet: AsyncFleet) -> RunView:
    """Return the chat window of the run, or of the run of that line."""
    return await fleet.runs.view(await fleet.runs.find(named, batch))


async def read_explanation(named: str, batch: str | None, fleet: AsyncFleet) -> Explanation:
    """Return why a run stopped or continues."""
    run, awaited = await read(named, batch, fleet)
    result = run.result()
    asks: tuple[Ask, ...] = ()
    if any(awaited_by(one.queue) is Awaited.RUN for one in awaited):
        asks = await asks_below(await fleet.runs.tree(run.run_id), fleet.approvals)
    found = replace(explain(result, awaited), below=tuple(map(AskBelow.of, asks)))
    if not result.lifecycle.is_terminal and (waits := load_outage(run.header.get("outage"))):
        return replace(found, says=_waits(result, waits, (await fleet.overview()).outages))
    if "after" in run.header and (before := await fleet.runs.waits_for(run.run_id)):
        return replace(found, says=_waits_for(result, before))
    moves = result.lifecycle in (Lifecycle.QUEUED, Lifecycle.IN_PROGRESS)
    if moves and (wait := await fleet.limits.wait_of(run.run_id)):
        step = result.steps_used + 1
        return replace(found, says=f"{result.lifecycle.value}: step {step} waits {wait}")
    if result.lifecycle is not Lifecycle.PAUSED or result.batch_id is None:
        return found
    with contextlib.suppress(ConfigurationError):  # the batch was forgotten
        progress = await (await fleet.batches.get(result.batch_id)).progress()
        if progress.held:
            return replace(found, says=f"paused: its batch is {progress.held_text}")
    return found


def _waits_for(result: AgentRunResult, before: Mapping[str, str]) -> str:
    named = [f"{run} ({status})" for run, status in list(before.items())[:_SHOWN]]
    more = f" and {len(before) - _SHOWN} more" if len(before) > _SHOWN else ""
    return f"{result.lifecycle.value}: begins when these have ended: {', '.join(named)}{more}"


def _waits(result: AgentRunResult, waits: Outage, known: Iterable[ServiceOutage]) -> str:
    """Return that a run waits for services that are out, and since when."""
    named = [str(one) for one in known if circuit_id(one.service) in waits.circuits]
    since = f"since {waits.since:%Y-%m-%d %H:%M:%S} UTC, without a slot"
    why = "; ".join(named) or "its model was out, and is back"
    return f"{result.lifecycle.value}: step {result.steps_used + 1} waits {since}: {why}"


def print_events(run_id: str, data: Path, *, follow: bool, chunks: bool, since: int) -> None:
    """Print the run's events, a line of JSON each; with `follow` until it has ended."""

    async def print_all(fleet: AsyncFleet) -> None:
        await fleet.runs.show(run_id)
        text = follow and chunks
        async for event in fleet.runs.events(run_id, since=since, follow=follow, chunks=text):
            print_json_line(event)
            await asyncio.sleep(0)

    with_fleet(data, print_all, waits=follow)
