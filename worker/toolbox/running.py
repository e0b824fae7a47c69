"""Runs one tool's function until it ends or its time is up, in the loop or in a thread.

Decides which of the two, and what a timeout is; knows nothing of records and messages.
"""

import asyncio
import functools
import inspect
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from contextvars import Context
from typing import Any

from stepfleet.orchestrator.errors import ToolExecutionError, ToolTimeoutError
from stepfleet.orchestrator.tools import Tool, ToolInvocation, context_of
from stepfleet.worker.toolbox.threads import ExpiredError, NoThreadFreeError, ToolThreads

_GRACE_SECONDS = 1.0
"""How long a cancelled tool may take to clean up before it is left alone."""

_log = logging.getLogger(__name__)


async def run_tool(
    tool: Tool[..., Any],
    bound: Mapping[str, Any],
    invocation: ToolInvocation,
    *,
    limiter: ToolThreads,
    timeout: float,  # noqa: ASYNC109 - the message needs it, and threads cannot be cancelled
) -> Any:
    """Return what the tool's function returns for the arguments `bound`.

    Raises `ToolTimeoutError` after `timeout` seconds, and whatever the function raises. When
    the caller is cancelled, a coroutine function is cancelled with it; a thread runs on, and is
    counted by `limiter`.
    """
    return await run_function(
        functools.partial(tool.function, **bound),
        invocation,
        blocking=tool.blocking,
        limiter=limiter,
        timeout=timeout,
    )


async def run_function(
    function: Callable[[], Any],
    invocation: ToolInvocation,
    *,
    blocking: bool,
    limiter: ToolThreads,
    timeout: float,  # noqa: ASYNC109 - as above
) -> Any:
    """Return what `function` returns, as `run_tool` does; `blocking` ones run in a thread."""
    timeout = math.inf if limiter.patient else timeout
    context = context_of(invocation)
    bound = functools.partial(context.run, function)
    try:
        if blocking and not limiter.inline:
            value = await limiter.run(bound, timeout=timeout)
        else:
            value = _called(bound)
        return await _in_loop(value, timeout, context) if inspect.isawaitable(value) else value
    except ExpiredError:
        raise _too_long(invocation.tool, timeout) from None
    except NoThreadFreeError as error:
        raise ToolTimeoutError(f"tool {invocation.tool!r} could not start: {error}") from None


def _too_long(name: str, timeout: float) -> ToolTimeoutError:
    return ToolTimeoutError(f"tool {name!r} took longer than its timeout of {timeout:g} s")


def _called(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except asyncio.CancelledError:
        # Taken for the step's own, it would hand the run back.
        raise _cancelled() from None
    except Exception:
        raise
    except BaseException as error:
        raise _ended(error) from error


def _ended(error: BaseException) -> RuntimeError:
    """Return an exception that stands for `error`.

    SystemExit and KeyboardInterrupt would end the event loop, and with it every run in it;
    GeneratorExit would end the step without a commit, again and again.
    """
    return RuntimeError(f"ended with {type(error).__name__}: {error}")


def _cancelled() -> ToolExecutionError:
    return ToolExecutionError("the tool cancelled itself")


async def _in_loop(answer: Awaitable[Any], timeout: float, context: Context) -> Any:  # noqa: ASYNC109
    # A task of its own, since a tool that ignores its cancellation would hold an
    # asyncio.timeout() scope, and with it the run, for ever.
    loop = asyncio.get_running_loop()
    task = loop.create_task(_contained(answer), context=context)
    try:
        finished, _ = await asyncio.wait({task}, timeout=timeout)
    except asyncio.CancelledError:
        await _end(task)
        raise
    if not finished:
        await _end(task)
        raise ExpiredError
    if task.cancelled():
        raise _cancelled()
    return task.result()


async def _contained(answer: Awaitable[Any]) -> Any:
    try:
        return await answer
    except (Exception, asyncio.CancelledError):
        raise
    except BaseException as error:
        raise _ended(error) from error


async def _end(task: "asyncio.Future[Any]") -> None:
    task.add_done_callback(_retrieve)
    task.cancel()
    finished, _ = await asyncio.wait({task}, timeout=_GRACE_SECONDS)
    if not finished:
        _log.warning("a tool ignores its cancellation and is left running: %r", task)


def _retrieve(task: "asyncio.Future[Any]") -> None:
    """Look at what nobody waits for any more, or asyncio logs it as never retrieved."""
    if not task.cancelled():
        task.exception()
