"""Tools: what they are, how their calls are parsed, what a running one may know.

Pure: neither Celery nor Redis nor HTTP. Execution lives in the worker.
"""

from stepfleet.orchestrator.tools.bounded_json import canonical_json
from stepfleet.orchestrator.tools.calls import drop_leaked_arguments, parse_tool_call
from stepfleet.orchestrator.tools.definition import Tool, ToolLike, ToolOptions, as_tool, tool
from stepfleet.orchestrator.tools.invocation import ToolInvocation, current_invocation, running
from stepfleet.orchestrator.tools.registry import ToolRegistry, registry_of

__all__ = [
    # defining tools
    "Tool",
    "ToolLike",
    "ToolOptions",
    "tool",
    "as_tool",
    "ToolRegistry",
    "registry_of",
    # calls
    "parse_tool_call",
    "drop_leaked_arguments",
    "canonical_json",
    # inside a running tool
    "ToolInvocation",
    "current_invocation",
    "running",
]
