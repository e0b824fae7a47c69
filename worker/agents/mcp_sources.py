"""The MCP servers of this worker's agents; without any the protocol's package is not imported."""

import importlib.util
from collections.abc import Iterable, Sequence
from typing import Protocol

from stepfleet.orchestrator.agents.agent import Agent
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.tools import McpServer, ToolRegistry


class Sources(Protocol):
    """Servers that have tools of their own, connected; see `toolbox.mcp`."""

    def registry(
        self, own: ToolRegistry, servers: Iterable[McpServer], reserved: Iterable[str]
    ) -> ToolRegistry:
        """Return the tools of `own` and of `servers`, which get no name among `reserved`."""

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


def sources_of(agents: Sequence[Agent]) -> Sources | None:
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
