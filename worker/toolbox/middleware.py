"""A tool call through its agent's middleware; trouble in a layer is the call's error."""

import time
from collections.abc import Awaitable, Callable
from datetime import datetime

from stepfleet.orchestrator.errors import AgentException, ToolExecutionError
from stepfleet.orchestrator.records.tools import ToolCall, ToolCallRecord
from stepfleet.orchestrator.tools import ToolInvocation, ToolRegistry
from stepfleet.orchestrator.tools.middleware import through_tool
from stepfleet.worker.toolbox.execution import described, failure_of


async def call_through_layers(
    call: ToolCall,
    tools: ToolRegistry,
    invocation: ToolInvocation,
    clock: Callable[[], datetime],
    execute: Callable[[ToolCall], Awaitable[ToolCallRecord]],
) -> ToolCallRecord:
    """Return the call's record as the outermost layer returns it.

    Raises `asyncio.CancelledError` alone.
    """
    timestamp, begun = clock(), time.monotonic()
    error: AgentException
    try:
        record: object = await through_tool(tools.middleware, call, invocation, execute)
        if isinstance(record, ToolCallRecord):
            return record
        error = ToolExecutionError(
            f"a middleware returned {type(record).__name__}; return the ToolCallRecord"
        )
    except AgentException as raised:
        error = raised
    except Exception as raised:  # noqa: BLE001 - middleware is foreign code; no call may be lost
        error = failure_of(raised)
    return ToolCallRecord(
        tool_name=call.name,
        call_id=call.id,
        arguments=call.arguments,
        is_error=True,
        duration_ms=round((time.monotonic() - begun) * 1000, 3),
        timestamp=timestamp,
        error=described(error, call),
        repeated=invocation.attempt > 1,
    )
