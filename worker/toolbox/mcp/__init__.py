"""Tools of MCP servers: connections, listings, names, meanings of answers.

Imported only by workers whose agents name such a server; needs the extra `mcp`.
"""

from stepfleet.worker.toolbox.mcp.registry import Sessions

__all__ = ["Sessions"]
