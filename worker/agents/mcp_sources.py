"""Whether this worker's agents have tools of servers; only then is the code for that loaded.

Without such agents neither the protocol's package nor anything of it is imported.
"""

import importlib.util
from collections.abc import Sequence
from typing import Protocol

from stepfleet.orchestrator.agents.agent import Agent
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.worker.agents.local import Sources


class OpenSources(Sources, Protocol):
    """Sources that are connected, and have to be closed."""

    async def aclose(self) -> None:
        """Disconnect from all of them."""


def check_sources(agents: Sequence[Agent]) -> None:
    """Raise `ConfigurationError` where an agent has MCP servers and the extra is missing."""
    for agent in agents:
        if agent.tools.servers and importlib.util.find_spec("mcp") is None:
            msg = (
                f"agent {agent.name!r} has the MCP server {agent.tools.servers[0].name!r}, and "
                "this worker lacks the package mcp; install stepfleet[mcp]"
            )
            raise ConfigurationError(msg)


def sources_of(agents: Sequence[Agent]) -> OpenSources | None:
    """Connect to the servers of all agents, in the background; None where there are none.

    Raises `ConfigurationError` as `check_sources` does.
    """
    servers = [server for agent in agents for server in agent.tools.servers]
    if not servers:
        return None
    check_sources(agents)
    # The protocol's package takes seconds to import.
    from stepfleet.worker.toolbox.mcp import Sessions  # noqa: PLC0415

    return Sessions(servers)
