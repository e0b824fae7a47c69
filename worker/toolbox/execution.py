"""Executes a tool call: lookup, check, run, time, record; middleware around it.

Decides what a call's outcome is. Tool trouble is a record with an error and never an
exception; only the cancellation of the step passes through. Knows nothing of models, Celery or
Redis.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from datetime import datetime, timedelta
from functools import partial
from typing import Any, TypeVar

from stepfleet.orchestrator.errors import (
    AgentException,
    InvalidToolCallError,
    ToolExecutionError,
)
from stepfleet.orchestrator.records.calls.tools import ToolCall, ToolCallRecord
from stepfleet.orchestrator.records.errors import ErrorInfo
from stepfleet.orchestrator.records.text.redaction import redact_error
from stepfleet.orchestrator.records.text.tracebacks import traceback_of
from stepfleet.orchestrator.tools import (
    StateUpdate,
    Tool,
    ToolInvocation,
    ToolRegistry,
    WithMedia,
)
from stepfleet.orchestrator.tools.middleware import through_tool
from stepfleet.orchestrator.tools.schemas.time_limit import run_check
from stepfleet.worker.toolbox.failure_log import log_failure
from stepfleet.worker.toolbox.results import RESULT_LIMIT, json_data
from stepfleet.worker.toolbox.running import run_function, run_tool
from stepfleet.worker.toolbox.threads import ToolThreads

Call = TypeVar("Call")
Result = TypeVar("Result")


async def execute_at_once(
    calls: Iterable[Call], execute: Callable[[Call], Coroutine[Any, Any, Result]]
) -> tuple[Result, ...]:
    """Return `execute(call)` of each call, all at once, in the order of `calls`.

    A tool's failure is a result; should `execute` itself raise (the store is gone), the other calls
    are cancelled and that exception is raised.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(execute(call)) for call in calls]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return tuple(task.result() for task in tasks)


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
    attempt = _Attempt(call, invocation, clock())
    data = partial(json_data, limit=result_limit)
    kept: dict[str, Any] = {}
    media: tuple[Any, ...] = ()
    try:
        if tools.late:
            await tools.listed()
        tool, bound = await _prepared(call, tools)
        timeout = tool.options.timeout or default_timeout
        deadline = attempt.timestamp + timedelta(seconds=timeout)
        known = invocation.model_copy(update={"deadline": deadline})
        value = await run_tool(tool, bound, known, limiter=limiter, timeout=timeout)
        if isinstance(value, Iterator):
            # Its code has not run yet, and may be as slow as any tool, or have no end.
            read = partial(data, value)
            value = await run_function(read, known, blocking=True, limiter=limiter, timeout=timeout)
        if isinstance(value, StateUpdate):
            kept = data(dict(value.custom_state))
            value = value.result
        if isinstance(value, WithMedia):
            media = _blocks(data(value.media))
            value = value.result
        outcome: dict[str, Any] = {"result": data(value), "custom_state": kept, "media": media}
    except Exception as error:  # noqa: BLE001 - tools may raise anything; it becomes the result
        outcome = {"error": error}
    return attempt.record(**outcome, version=tools.digest_of(call.name) if tools.late else None)


async def call_through_layers(
    call: ToolCall,
    tools: ToolRegistry,
    invocation: ToolInvocation,
    clock: Callable[[], datetime],
    execute: Callable[[ToolCall], Awaitable[ToolCallRecord]],
) -> ToolCallRecord:
    """Return the call's record as the outermost layer of the agent's middleware returns it.

    A failing layer is the call's error. Raises `asyncio.CancelledError` alone.
    """
    attempt = _Attempt(call, invocation, clock())
    try:
        record: object = await through_tool(tools.middleware, call, invocation, execute)
    except Exception as error:  # noqa: BLE001 - middleware is foreign code; no call may be lost
        return attempt.record(error=error)
    if isinstance(record, ToolCallRecord):
        return record
    wrong = f"a middleware returned {type(record).__name__}; return the ToolCallRecord"
    return attempt.record(error=ToolExecutionError(wrong))


class _Attempt:
    """One attempt at a call; it makes the record with the attempt's time and duration."""

    def __init__(self, call: ToolCall, invocation: ToolInvocation, timestamp: datetime) -> None:
        self._call = call
        self._invocation = invocation
        self._began = time.monotonic()
        self.timestamp = timestamp

    def record(self, *, error: Exception | None = None, **outcome: Any) -> ToolCallRecord:
        return ToolCallRecord.model_construct(
            tool_name=self._call.name,
            call_id=self._call.id,
            arguments=self._call.arguments,
            is_error=error is not None,
            duration_ms=round((time.monotonic() - self._began) * 1000, 3),
            timestamp=self.timestamp,
            error=None if error is None else _described(error, self._call, self._invocation.run_id),
            repeated=self._invocation.attempt > 1,
            **outcome,
        )


async def _prepared(call: ToolCall, tools: ToolRegistry) -> tuple[Tool[..., Any], dict[str, Any]]:
    """Return the tool and its checked arguments; nothing was run yet when this raises."""
    if call.error is not None:
        raise InvalidToolCallError(call.error)
    tool = tools.get(call.name)
    return tool, await run_check(tool.check, call.arguments)


def _blocks(media: Any) -> tuple[dict[str, Any], ...]:
    """Return a result's media, whose record is not validated. Raises `ToolExecutionError`."""
    if not isinstance(media, list) or not all(isinstance(one, dict) for one in media):
        raise ToolExecutionError("the tool's media must be a list of content blocks")
    return tuple(media)


def _message_of(error: Exception) -> str:
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - the tool's exception is foreign code too
        text = "(its message cannot be shown)"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _described(error: Exception, call: ToolCall, run_id: str) -> ErrorInfo:
    """Return a failed call's error: secrets are redacted, long messages cut."""
    raised = error
    if not isinstance(error, AgentException):
        error = ToolExecutionError(_message_of(error))
    message = redact_error(error.message).encode("utf-8", "backslashreplace").decode()
    if len(message) > _MAX_MESSAGE:
        more = len(message) - _MAX_MESSAGE
        message = f"{message[:_MAX_MESSAGE]} ... ({more} more characters)"
    found = traceback_of(raised)
    log_failure(f"tool {call.name!r}", message, found, raised, run_id)
    info = error.to_info(tool_name=call.name, call_id=call.id, traceback=found)
    return info.model_copy(update={"message": message})
