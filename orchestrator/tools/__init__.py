"""Tools: their definition, the parsing of their calls, the context of a running one.

Neither Celery nor Redis nor HTTP. Execution lives in the worker.
"""

from stepfleet.orchestrator.tools.calls import (
    bounded_calls,
    drop_leaked_arguments,
    parse_tool_call,
    parse_tool_calls,
)
from stepfleet.orchestrator.tools.definition import (
    Tool,
    ToolLike,
    ToolOptions,
    as_tool,
    lazy_tool,
    tool,
)
from stepfleet.orchestrator.tools.invocation import (
    CallStatus,
    Done,
    StateUpdate,
    ToolInvocation,
    WithMedia,
    context_of,
    current_invocation,
    running,
)
from stepfleet.orchestrator.tools.mcp import McpServer, ToolSourceError, mcp_server
from stepfleet.orchestrator.tools.middleware import Middleware, NextModel, NextTool
from stepfleet.orchestrator.tools.registry import (
    ToolCatalog,
    ToolRegistry,
    registry_of,
    tool_catalog,
    tools_of,
)
from stepfleet.orchestrator.tools.schemas.bounded_json import canonical_json

__all__ = [
    # defining tools
    "Tool",
    "ToolLike",
    "ToolOptions",
    "tool",
    "as_tool",
    "ToolRegistry",
    "registry_of",
    "tools_of",
    "ToolCatalog",
    "tool_catalog",
    "lazy_tool",
    "McpServer",
    "ToolSourceError",
    "mcp_server",
    # around calls
    "Middleware",
    "NextModel",
    "NextTool",
    # calls
    "parse_tool_call",
    "parse_tool_calls",
    "bounded_calls",
    "drop_leaked_arguments",
    "canonical_json",
    # the outcome of a lost call
    "CallStatus",
    "Done",
    # inside a running tool
    "ToolInvocation",
    "context_of",
    "current_invocation",
    "running",
    "StateUpdate",
    "WithMedia",
]
