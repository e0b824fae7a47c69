"""Tools of MCP servers: connections, listings, names, and what answers mean.

Imported only by workers whose agents name such a server; needs the extra `mcp`.
"""

from stepfleet.worker.toolbox.mcp.sessions import Sessions

__all__ = ["Sessions"]
