"""Runs the calls of one step in order or at once; knows nothing of what running one means."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

Call = TypeVar("Call")
Result = TypeVar("Result")


async def execute_in_order(
    calls: Sequence[Call],
    execute: Callable[[int, Call], Awaitable[Result]],
    *,
    parallel: bool,
) -> tuple[Result, ...]:
    """Return `execute(index, call)` of each call, in the order of `calls`.

    With `parallel` they run at once. A tool's failure is a result; should `execute` itself raise
    (the store is gone), the other calls are cancelled and that exception is raised.
    """
    if not parallel or len(calls) <= 1:
        return tuple([await execute(index, call) for index, call in enumerate(calls)])
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(_started(execute, index, call))
                for index, call in enumerate(calls)
            ]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return tuple(task.result() for task in tasks)


async def _started(
    execute: Callable[[int, Call], Awaitable[Result]], index: int, call: Call
) -> Result:
    return await execute(index, call)
