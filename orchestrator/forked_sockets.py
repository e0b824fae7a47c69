"""Leaves an event loop and its connections behind in a child process that has inherited them.

Closing them in the usual way would take them from the parent: both processes share what watches
the sockets (epoll). So their descriptors are made to point to nothing in this process, and the
objects are kept for its life, because the collector would close them in the usual way.
"""

import asyncio
import contextlib
import os
from typing import Any

_LEFT: list[object] = []


def abandon_sockets(loop: asyncio.AbstractEventLoop, *kept: object) -> None:
    """Let go of what `loop` watches and of the loop itself; keep `kept` from the collector.

    For the child of a fork, where the loop's thread does not run.
    """
    _LEFT.extend((loop, kept))
    null = os.open(os.devnull, os.O_RDWR)
    try:
        for descriptor in _descriptors(loop):
            with contextlib.suppress(OSError):
                os.dup2(null, descriptor, inheritable=False)
    finally:
        os.close(null)


def _descriptors(loop: Any) -> list[int]:
    """Return what a loop of asyncio watches, wakes itself by and watches with."""
    found: list[int] = []
    selector = getattr(loop, "_selector", None)
    if selector is not None:
        found += [key.fd for key in (selector.get_map() or {}).values()]
        if hasattr(selector, "fileno"):
            found.append(selector.fileno())
    if (waker := getattr(loop, "_csock", None)) is not None:
        found.append(waker.fileno())
    return [one for one in found if one > 2]  # noqa: PLR2004 - never the standard streams
