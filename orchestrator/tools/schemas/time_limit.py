"""How long a check of data may take, and checks that are continued off the event loop.

Knows neither schemas nor data: checks call `tick` as often as they can.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

LONGEST_CHECK = 2.0
"""Seconds of CPU time that one check may take; sane schemas and data take milliseconds."""
BRIEF_CHECK = 0.05
"""Seconds of CPU time after which a check leaves the event loop, where it can."""

Result = TypeVar("Result")


class TooMuchWorkError(Exception):
    """A check takes too long."""


class SlowCheckError(Exception):
    """A check takes longer than the event loop can wait; it is repeated in a thread."""


class _Allowance:
    """Seconds that are left for all checks of a block."""

    def __init__(self, left: float) -> None:
        self.left = left

    def __enter__(self) -> None:
        self._token = _allowance.set(self)

    def __exit__(self, *_: object) -> None:
        _allowance.reset(self._token)


_until: ContextVar[float] = ContextVar("stepfleet_check_until")
_is_brief: ContextVar[bool] = ContextVar("stepfleet_check_is_brief", default=False)
_allowance: ContextVar[_Allowance | None] = ContextVar("stepfleet_check_allowance", default=None)


def tick() -> None:
    """Raise `TooMuchWorkError` or `SlowCheckError` where the check under way takes too long."""
    if time.thread_time() > _until.get(float("inf")):
        raise SlowCheckError if _is_brief.get() else TooMuchWorkError


@contextmanager
def limited(seconds: float | None = None) -> Iterator[None]:
    """Bound the block by `seconds` of CPU time (None: `LONGEST_CHECK`), less within `run_check`.

    `tick` raises where the time is up; so does the beginning where an allowance is used up.
    """
    longest = LONGEST_CHECK if seconds is None else seconds
    allowance = _allowance.get()
    if allowance is not None:
        longest = min(longest, allowance.left)
        if longest <= 0:
            raise TooMuchWorkError
    begun = time.thread_time()
    token = _until.set(begun + (min(longest, BRIEF_CHECK) if _is_brief.get() else longest))
    try:
        yield
    finally:
        _until.reset(token)
        if allowance is not None:
            allowance.left -= time.thread_time() - begun


def allowed(seconds: float) -> _Allowance:
    """Bound all checks of the `with` block together by `seconds` of CPU time."""
    return _Allowance(seconds)


async def run_check(check: Callable[..., Result], *arguments: Any) -> Result:
    """Return the result of `check`, made in a thread where it is not brief.

    `check` is restarted there, so it must change nothing. Raises the exceptions of `check`.
    """
    token = _is_brief.set(True)
    try:
        return check(*arguments)
    except SlowCheckError:
        pass
    finally:
        _is_brief.reset(token)
    return await asyncio.to_thread(check, *arguments)
