"""What is said about one run: its trace, why it stopped, its events."""

import asyncio
from pathlib import Path

from stepfleet.orchestrator.cli.doctor.pending_tools import AwaitedTool, awaited_tools, judged
from stepfleet.orchestrator.cli.setup.with_fleet import with_fleet
from stepfleet.orchestrator.cli.terminal.output import print_json, print_json_line, screen
from stepfleet.orchestrator.cli.views import explain as explanation
from stepfleet.orchestrator.cli.views import trace
from stepfleet.orchestrator.client.fleet import AsyncFleet
from stepfleet.orchestrator.client.runs import inputs_of
from stepfleet.orchestrator.store.runs.reading import StoredRun


def show_run(run_id: str, data: Path, *, json: bool, full: bool) -> None:
    """Print the run's trace, or its whole result as JSON."""

    async def show(fleet: AsyncFleet) -> None:
        stored = await fleet.runs.show(run_id)
        result = stored.result()
        if json:
            messages = [message.to_dict() for message in stored.state.messages]
            print_json({**result.to_dict(), "messages": messages})
        else:
            awaited = await _awaited(fleet, stored)
            screen().print(trace.trace(result, inputs_of(stored), full=full, awaited=awaited))

    with_fleet(data, show)


def explain_run(run_id: str, data: Path, *, json: bool) -> None:
    """Print why the run stopped: every criterion of its newest evaluation, with its numbers."""

    async def explain(fleet: AsyncFleet) -> None:
        stored = await fleet.runs.show(run_id)
        found = explanation.explain(stored.result(), await _awaited(fleet, stored))
        if json:
            print_json(found.to_dict())
        else:
            screen().print(explanation.picture(found))

    with_fleet(data, explain)


async def _awaited(fleet: AsyncFleet, run: StoredRun) -> tuple[AwaitedTool, ...]:
    """Return the tools that a run waits for; the fleet is asked only where there are any."""
    awaited = awaited_tools(run)
    return judged(awaited, (await fleet.overview()).workers) if awaited else ()


def print_events(run_id: str, data: Path, *, follow: bool, chunks: bool, since: int) -> None:
    """Print the run's events, a line of JSON each; with `follow` until it has ended."""

    async def tell(fleet: AsyncFleet) -> None:
        await fleet.runs.show(run_id)
        text = follow and chunks
        async for event in fleet.runs.events(run_id, since=since, follow=follow, chunks=text):
            print_json_line(event)
            await asyncio.sleep(0)

    with_fleet(data, tell, waits=follow)
