"""Reads what `show`, `explain` and `events` print of one run."""

import asyncio
import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from stepfleet.orchestrator.cli.setup.with_fleet import with_fleet
from stepfleet.orchestrator.cli.terminal.format import shown
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
from stepfleet.orchestrator.client.approvals import asks_below
from stepfleet.orchestrator.client.fleet import AsyncFleet
from stepfleet.orchestrator.client.rendering import RunView
from stepfleet.orchestrator.client.runs import inputs_of
from stepfleet.orchestrator.client.watching.standstill import begins_after
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.protocol.claim import Outage
from stepfleet.orchestrator.protocol.verdict import circuit_id
from stepfleet.orchestrator.records.calls.answers import Ask, Awaited, awaited_by
from stepfleet.orchestrator.records.run.summary import RunTree
from stepfleet.orchestrator.records.state import Lifecycle
from stepfleet.orchestrator.store.circuits import ServiceOutage
from stepfleet.orchestrator.store.codec import load_outage, moment
from stepfleet.orchestrator.store.runs.reading import StoredRun, next_attempt

_READ = 10
"""Runs before a run whose calls that wait for people are read."""
Found = tuple[StoredRun, tuple[AwaitedTool, ...]]


@dataclass(frozen=True, slots=True)
class Shown:
    """A run, the calls that it waits for, why it does not move, and the runs below it.

    `asks` are the calls of those below that wait for people.
    """

    run: StoredRun
    awaited: tuple[AwaitedTool, ...]
    waits: str
    tree: RunTree
    asks: tuple[Ask, ...]


async def read_tree(named: str, batch: str | None, fleet: AsyncFleet) -> Shown:
    """Return the same as `read`, and all else that `show` prints of the run."""
    run, awaited = await read(named, batch, fleet)
    tree = await fleet.runs.tree(run.run_id)
    waits, _ = await _waits(run, fleet)
    return Shown(run, awaited, waits, tree, await asks_below(tree, fleet.approvals))


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
    messages = [message.to_dict() for message in found.run.state.messages]
    below = [one.to_dict() for one in found.tree.below]
    return {**found.run.result().to_dict(), "messages": messages, "below": below}


def picture(found: Shown, *, full: bool, debug: bool = False) -> RenderableType:
    """Return the run's trace and the runs below it, with `debug` the tracebacks of what failed."""
    run = found.run
    parts = [trace(run.result(), inputs_of(run), full=full, debug=debug, awaited=found.awaited)]
    if found.waits:
        parts.append(Text.assemble(("waits: ", "bold"), (shown(found.waits), "yellow")))
    below = listing.below(found.tree, found.asks)
    return Group(*parts, *([below] if below else []))


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
    waits, before = await _waits(run, fleet)
    if waits:
        in_front = [AskBelow.of(one) for one in await _asks_of(before, fleet)]
        says = f"{result.lifecycle.value}: {waits}"
        return replace(found, says=says, before=tuple(in_front))
    if result.lifecycle is not Lifecycle.PAUSED or result.batch_id is None:
        return found
    with contextlib.suppress(ConfigurationError):  # the batch was forgotten
        progress = await (await fleet.batches.get(result.batch_id)).progress()
        if progress.held:
            return replace(found, says=f"paused: its batch is {progress.held_text}")
    return found


async def _waits(run: StoredRun, fleet: AsyncFleet) -> tuple[str, Iterable[str]]:
    """Return why a run does not move, empty where nothing is known, and the runs before it."""
    if run.state.status.is_terminal:
        return "", ()
    step = f"step {int(run.header['step']) + 1}"
    if waits := load_outage(run.header.get("outage")):
        return f"{step} waits {_for_services(waits, (await fleet.overview()).outages)}", ()
    if "after" in run.header and (before := await fleet.runs.waits_for(run.run_id)):
        return begins_after(before), before
    if run.state.status is Lifecycle.PAUSED:
        return "", ()
    if wait := await fleet.limits.wait_of(run.run_id):
        return f"{step} waits {wait}", ()
    times = run.header.get("not_before"), run.header.get("updated")
    lost = ((moment(one.at_ms), one.reason) for one in run.lost)
    again = next_attempt(*times, lost, datetime.now(UTC))
    return f"{step} waits for {again}" if again else await fleet.runs.standstill(run.run_id), ()


async def _asks_of(runs: Iterable[str], fleet: AsyncFleet) -> list[Ask]:
    """Return the calls of the first runs, and of those below them, that wait for people."""
    found: list[Ask] = []
    for run_id in islice(runs, _READ):
        found += await fleet.approvals.of_run(run_id)
        with contextlib.suppress(ConfigurationError):  # it is still to be created
            found += await asks_below(await fleet.runs.tree(run_id, limit=_READ), fleet.approvals)
    return found


def _for_services(waits: Outage, known: Iterable[ServiceOutage]) -> str:
    """Return since when a run waits for services that are out, and why."""
    named = [str(one) for one in known if circuit_id(one.service) in waits.circuits]
    why = "; ".join(named) or "its model was out, and is back"
    return f"since {waits.since:%Y-%m-%d %H:%M:%S} UTC, without a slot: {why}"


def print_events(run_id: str, data: Path, *, follow: bool, chunks: bool, since: int) -> None:
    """Print the run's events, a line of JSON each; with `follow` until it has ended."""

    async def print_all(fleet: AsyncFleet) -> None:
        await fleet.runs.show(run_id)
        text = follow and chunks
        async for event in fleet.runs.events(run_id, since=since, follow=follow, chunks=text):
            print_json_line(event)
            await asyncio.sleep(0)

    with_fleet(data, print_all, waits=follow)
