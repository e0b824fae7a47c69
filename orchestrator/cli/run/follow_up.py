"""`stepfleet then`: a batch that begins when another one has ended."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.orchestrator.cli.results.input_file import default_agent
from stepfleet.orchestrator.cli.setup.with_fleet import with_fleet
from stepfleet.orchestrator.cli.terminal.exit_codes import COMPLETED
from stepfleet.orchestrator.cli.terminal.output import notice, print_json, print_text
from stepfleet.orchestrator.client.fleet import AsyncFleet
from stepfleet.orchestrator.errors import ConfigurationError


def follow_batch(
    batch_id: str,
    text: str | None,
    data: Path,
    *,
    agent: str | None,
    agents: str | None,
    options: Mapping[str, Any],
    json: bool,
) -> int:
    """Register the batch that follows another one, and print its id; return the exit code."""
    known = load_agents(agents) if agents else {}
    name = default_agent(known, agent) if known else agent
    if name is None:
        raise ConfigurationError("name the agent of the new batch: --agent NAME")

    async def register(fleet: AsyncFleet) -> int:
        batch = await fleet.batches.get(batch_id)
        following = await batch.then(known.get(name, name), text, **options)
        if not following.is_new:
            notice(f"Batch {following.id} follows batch {batch_id} already")
        if json:
            print_json({**(await following.progress()).to_dict(), "is_new": following.is_new})
        else:
            print_text(following.id)
        return COMPLETED

    return with_fleet(data, register, warn=True)
