"""One attempt at one tool call, in a step or in a task of its own: run it, or say what is known.

Decides whether a call that an earlier worker had started may run again.
"""

from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from typing import Any

from stepfleet.orchestrator.protocol.attempt import unknown_outcome
from stepfleet.orchestrator.records.calls.tools import ToolCall, ToolCallRecord
from stepfleet.orchestrator.tools import (
    CallStatus,
    Tool,
    ToolInvocation,
    ToolRegistry,
    ToolSourceError,
)
from stepfleet.worker.toolbox.box import LocalToolbox


async def attempt_call(
    call: ToolCall,
    invocation: ToolInvocation,
    tools: ToolRegistry,
    toolbox: LocalToolbox,
    clock: Callable[[], datetime],
) -> ToolCallRecord:
    """Return the call's record. Raises `asyncio.CancelledError` alone.

    One that was started before, and is not idempotent, is only run again where its tool's status
    hook says that it was not done.
    """
    if invocation.attempt > 1 and tools.late:
        with suppress(ToolSourceError):
            await tools.listed()
        if call.name not in tools:
            return unknown_outcome(call, clock())
    if invocation.attempt > 1 and call.name in tools:
        tool = tools.get(call.name)
        if not tool.idempotent and (known := await _asked(call, tool, invocation, toolbox, clock)):
            return known
    return await toolbox.execute(call, tools, invocation, clock=clock)


async def _asked(
    call: ToolCall,
    tool: Tool[..., Any],
    invocation: ToolInvocation,
    toolbox: LocalToolbox,
    clock: Callable[[], datetime],
) -> ToolCallRecord | None:
    """Return what became of the lost call, or that nobody knows; None where it was not done."""
    found = await toolbox.recall(call, tool, invocation, clock=clock)
    if found is CallStatus.NOT_DONE:
        return None
    return unknown_outcome(call, clock()) if isinstance(found, CallStatus) else found
