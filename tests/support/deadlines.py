"""Waits for a condition until a deadline; knows nothing of what is waited for."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

_PAUSE_SECONDS = 0.01
_LONGEST_PAUSE_SECONDS = 0.2
_DEAR = 4
"""By what factor a pause is longer than the look before it: most of the machine is left to what is
waited for, however dear the look (a page of Flower's, all processes, a connection of its own)."""


def _pause(looked_seconds: float) -> float:
    return min(max(_PAUSE_SECONDS, looked_seconds * _DEAR), _LONGEST_PAUSE_SECONDS)


def wait_until(check: Callable[[], T], *, within: float = 60.0, what: str = "the condition") -> T:
    """Return the first true answer of ``check``; fail the test after ``within`` seconds."""
    deadline = time.monotonic() + within
    while True:
        began = time.monotonic()
        answer = check()
        if answer:
            return answer
        if (now := time.monotonic()) >= deadline:
            raise AssertionError(f"{what} did not come true within {within} s; last: {answer!r}")
        time.sleep(_pause(now - began))


async def until(
    check: Callable[[], Awaitable[T]], *, within: float = 60.0, what: str = "the condition"
) -> T:
    """Return the first true answer of the coroutine function ``check``, like ``wait_until``."""
    deadline = time.monotonic() + within
    while True:
        began = time.monotonic()
        answer = await check()
        if answer:
            return answer
        if (now := time.monotonic()) >= deadline:
            raise AssertionError(f"{what} did not come true within {within} s; last: {answer!r}")
        await asyncio.sleep(_pause(now - began))
