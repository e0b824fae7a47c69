"""The sessions of one event loop: one per MCP server, whichever agents name it."""

import asyncio
from collections.abc import Iterable

from stepfleet.orchestrator.tools import ToolRegistry
from stepfleet.orchestrator.tools.mcp import McpServer
from stepfleet.worker.toolbox.mcp.registry import ListedTools
from stepfleet.worker.toolbox.mcp.session import Session


class Sessions:
    """Sessions by server; they connect as soon as they are made."""

    def __init__(self, servers: Iterable[McpServer] = ()) -> None:
        self._sessions: dict[McpServer, Session] = {}
        for server in servers:
            self._of(server)

    def registry(
        self, own: ToolRegistry, servers: Iterable[McpServer], reserved: Iterable[str]
    ) -> ToolRegistry:
        """Return the tools of `own` and of `servers`, which get no name among `reserved`."""
        return ListedTools(own, [self._of(server) for server in servers], reserved)

    async def aclose(self) -> None:
        """Disconnect from all of them."""
        await asyncio.gather(*(one.aclose() for one in self._sessions.values()))

    def _of(self, server: McpServer) -> Session:
        if server not in self._sessions:
            self._sessions[server] = Session(server)
            self._sessions[server].start()
        return self._sessions[server]
