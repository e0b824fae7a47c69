"""The one function that executes a tool call: lookup, check, run, time, record.

Decides what a call's outcome is. Tool trouble is a record with an error and never an
exception; only the cancellation of the step passes through. Knows nothing of models, Celery or
Redis.
"""

import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from stepfleet.orchestrator.errors import (
    AgentException,
    InvalidToolCallError,
    ToolExecutionError,
)
from stepfleet.orchestrator.records.errors import ErrorInfo
from stepfleet.orchestrator.records.text.redaction import redact_error
from stepfleet.orchestrator.records.tools import ToolCall, ToolCallRecord
from stepfleet.orchestrator.tools import (
    StateUpdate,
    Tool,
    ToolInvocation,
    ToolRegistry,
    WithMedia,
)
from stepfleet.orchestrator.tools.schemas.time_limit import run_check
from stepfleet.worker.toolbox.results import RESULT_LIMIT, json_data
from stepfleet.worker.toolbox.running import run_function, run_tool
from stepfleet.worker.toolbox.threads import ToolThreads

DEFAULT_TIMEOUT = 60.0
"""Seconds that a tool may take which names no timeout of its own."""

_MAX_MESSAGE = 2000


async def execute_call(
    call: ToolCall,
    tools: ToolRegistry,
    invocation: ToolInvocation,
    *,
    clock: Callable[[], datetime],
    limiter: ToolThreads,
    default_timeout: float = DEFAULT_TIMEOUT,
    result_limit: int = RESULT_LIMIT,
) -> ToolCallRecord:
    """Execute `call` and return its record, whatever happens.

    `clock` gives the UTC time, `default_timeout` is in seconds, `result_limit` in bytes. A
    record of a second or later attempt is marked as repeated. Raises only
    `asyncio.CancelledError`, when the caller is cancelled.
    """
    timestamp = clock()
    begun = time.monotonic()
    result, error, kept, media = None, None, {}, ()
    try:
        if tools.late:
            await tools.listed()
        tool, bound = await _prepared(call, tools)
        timeout = tool.options.timeout or default_timeout
        known = invocation.model_copy(update={"deadline": timestamp + timedelta(seconds=timeout)})
        value = await run_tool(tool, bound, known, limiter=limiter, timeout=timeout)
        if isinstance(value, Iterator):
            # Its code has not run yet, and may be as slow as any tool, or have no end.
            data = partial(json_data, value, limit=result_limit)
            value = await run_function(data, known, blocking=True, limiter=limiter, timeout=timeout)
        if isinstance(value, StateUpdate):
            kept = json_data(dict(value.custom_state), limit=result_limit)
            value = value.result
        if isinstance(value, WithMedia):
            media = tuple(json_data(value.media, limit=result_limit))
            value = value.result
        result = json_data(value, limit=result_limit)
    except AgentException as raised:
        error = described(raised, call)
    except Exception as raised:  # noqa: BLE001 - tools may raise anything; it becomes the result
        error = described(failure_of(raised), call)
    return ToolCallRecord(
        tool_name=call.name,
        call_id=call.id,
        arguments=call.arguments,
        result=result,
        is_error=error is not None,
        duration_ms=round((time.monotonic() - begun) * 1000, 3),
        timestamp=timestamp,
        error=error,
        repeated=invocation.attempt > 1,
        custom_state={} if error else kept,
        media=() if error else media,
        version=tools.digest_of(call.name) if tools.late else None,
    )


async def _prepared(call: ToolCall, tools: ToolRegistry) -> tuple[Tool[..., Any], dict[str, Any]]:
    """Return the tool and its checked arguments; nothing was run yet when this raises."""
    if call.error is not None:
        raise InvalidToolCallError(call.error)
    tool = tools.get(call.name)
    return tool, await run_check(tool.check, call.arguments)


def failure_of(error: Exception) -> ToolExecutionError:
    """Return the error of a call whose code raised `error`: its type and message."""
    return ToolExecutionError(_said(error))


def _said(error: Exception) -> str:
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - the tool's exception is foreign code too
        text = "(its message cannot be shown)"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def described(error: AgentException, call: ToolCall) -> ErrorInfo:
    """Return what a failed call's record says: secrets blacked out, long messages cut."""
    message = redact_error(error.message).encode("utf-8", "backslashreplace").decode()
    if len(message) > _MAX_MESSAGE:
        more = len(message) - _MAX_MESSAGE
        message = f"{message[:_MAX_MESSAGE]} ... ({more} more characters)"
    info = error.to_info(tool_name=call.name, call_id=call.id)
    return info.model_copy(update={"message": message})
