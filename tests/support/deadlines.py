"""Waits for a condition until a deadline; knows nothing of what is waited for."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

_PAUSE_SECONDS = 0.01


def wait_until(check: Callable[[], T], *, within: float = 60.0, what: str = "the condition") -> T:
    """Return the first true answer of ``check``; fail the test after ``within`` seconds."""
    deadline = time.monotonic() + within
    while True:
        answer = check()
        if answer:
            return answer
        if time.monotonic() >= deadline:
            raise AssertionError(f"{what} did not come true within {within} s; last: {answer!r}")
        time.sleep(_PAUSE_SECONDS)


async def until(
    check: Callable[[], Awaitable[T]], *, within: float = 60.0, what: str = "the condition"
) -> T:
    """Return the first true answer of the coroutine function ``check``, like ``wait_until``."""
    deadline = time.monotonic() + within
    while True:
        answer = await check()
        if answer:
            return answer
        if time.monotonic() >= deadline:
            raise AssertionError(f"{what} did not come true within {within} s; last: {answer!r}")
        await asyncio.sleep(_PAUSE_SECONDS)
