"""One MCP server as a worker sees it: connected while the worker lives, shared by all its runs.

Decides when to reconnect, what calls do meanwhile, and which calls may be repeated.
Knows neither agents nor runs.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Mapping
from typing import Any

from mcp import MCPError
from mcp_types import CONNECTION_CLOSED, CallToolResult

from stepfleet.orchestrator.errors import ToolExecutionError
from stepfleet.orchestrator.tools.mcp import McpServer, ToolSourceError
from stepfleet.worker.toolbox.mcp.connection import Link, connected
from stepfleet.worker.toolbox.mcp.listing import Definition

log = logging.getLogger(__name__)

FIRST_PAUSE = 0.5
LONGEST_PAUSE = 30.0
HEALTHY = 10.0
"""Seconds after which a connection that ends is made again at once."""
CLOSING = 8.0
"""Seconds that a server has to end; its transport's own limits add up to less."""
_ENDED = "Session terminated"


class Session:
    """Calls one server, in one event loop. `listing` is what it offered last, or None."""

    def __init__(self, server: McpServer) -> None:
        self.server = server
        self.listing: tuple[Definition, ...] | None = None
        self._link: Link | None = None
        self._failure = ""
        self._was_up = False
        self._tried = asyncio.Event()
        self._closing = asyncio.Event()
        self._owner: asyncio.Task[None] | None = None
        self._limit: asyncio.Timeout | None = None

    def start(self) -> None:
        """Connect in the background, and stay connected. Safe to call again."""
        if self._owner is None and not self._closing.is_set():
            self._owner = asyncio.create_task(
                self._stay(), name=f"stepfleet-mcp-{self.server.name}"
            )

    async def listed(self) -> tuple[Definition, ...]:
        """Return what the server offers, or offered when it was last there.

        Raises `ToolSourceError` where it has not been reached yet.
        """
        if self.listing is None:
            await self._attempt()
        if self.listing is None:
            raise self._away()
        return self.listing

    async def call(
        self, tool: str, arguments: Mapping[str, Any], meta: Mapping[str, Any], *, again: bool
    ) -> CallToolResult:
        """Return the server's answer to a call; `again` says whether it may be made twice.

        Raises `ToolSourceError` where the server is away, and `ToolExecutionError` where it
        refuses, or was lost while the call ran. A cancellation is passed on to the server.
        """
        try:
            return await self._call(tool, arguments, meta)
        except _LostError as lost:
            if not again:
                raise ToolExecutionError(
                    f"MCP server {self.server.name!r} was lost while the call ran, and whether "
                    f"it took effect is not known: {lost}"
                ) from None
        try:
            return await self._call(tool, arguments, meta)
        except _LostError as lost:
            raise ToolSourceError(f"MCP server {self.server.name!r} was lost: {lost}") from None

    async def aclose(self) -> None:
        """Disconnect, and end a server that was started."""
        self._closing.set()
        if self._link:
            self._link.stirred.set()
        if self._limit:
            # To cancel the owner would also break off the end of a server that was started.
            with contextlib.suppress(RuntimeError):
                self._limit.reschedule(0.0)
        if self._owner is None:
            return
        await asyncio.wait({self._owner}, timeout=CLOSING)
        self._owner.cancel()
        await asyncio.gather(self._owner, return_exceptions=True)

    async def _call(
        self, tool: str, arguments: Mapping[str, Any], meta: Mapping[str, Any]
    ) -> CallToolResult:
        if self._link and self._link.ended:
            self._lose(self._link)
        if self._link is None:
            await self._attempt()
        link = self._link
        if link is None:
            raise self._away()
        try:
            return await link.client.call_tool(tool, dict(arguments), meta=dict(meta))  # type: ignore[arg-type]
        except MCPError as error:
            if error.code == CONNECTION_CLOSED or error.message == _ENDED:
                self._lose(link)
                raise _LostError(error.message) from None
            raise ToolExecutionError(
                f"MCP server {self.server.name!r} refuses: {error.message} ({error.code})"
            ) from None
        except OSError as error:
            self._lose(link)
            raise _LostError(reason(error)) from None

    def _lose(self, link: Link) -> None:
        """Have a connection that is of no use any more made again; calls wait for that."""
        link.end()
        if self._link is link:
            self._link = None
            self._tried.clear()

    async def _attempt(self) -> None:
        """Wait for the attempt to connect that is under way, if there is one."""
        self.start()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._tried.wait(), self.server.connect_timeout)

    def _away(self) -> ToolSourceError:
        why = self._failure or "it has not answered yet"
        return ToolSourceError(f"MCP server {self.server.name!r} is away: {why}")

    async def _stay(self) -> None:
        """Hold a connection, whoever ends it, until this session is closed."""
        failures = 0
        while not self._closing.is_set():
            begun, self._failure = time.monotonic(), ""
            try:
                await self._hold()
            except asyncio.CancelledError:
                # The protocol's client cancels its own task where its connection breaks.
                if self._closing.is_set() or _is_cancelled():
                    raise
                self._failure = "the connection broke"
            except Exception as error:  # noqa: BLE001 - whatever a transport raises, it is away
                self._failure = reason(error)
            if self._closing.is_set():
                break
            failures = 1 if time.monotonic() - begun > HEALTHY else failures + 1
            pause = pause_after(failures, random.random())  # noqa: S311 - jitter
            log.warning(
                "MCP server %r is away: %s; tried again in %.1f s",
                self.server.name,
                self._failure or "it has ended",
                pause,
            )
            # Calls wait for a server that was just there, and fail where it stays away.
            if failures > 1 or not self._was_up:
                self._tried.set()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), pause)
            self._tried.clear()
        self._tried.set()

    async def _hold(self) -> None:
        self._was_up = False
        self._limit = asyncio.timeout(self.server.connect_timeout)
        async with connected(self.server, self._limit) as link:
            self.listing = await self._look(link)
            self._link, self._was_up = link, True
            self._tried.set()
            try:
                while not self._closing.is_set():
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(link.stirred.wait(), self.server.refresh)
                    if link.ended or self._closing.is_set():
                        return
                    link.stirred.clear()
                    self.listing = await self._look(link)
            finally:
                self._lose(link)

    async def _look(self, link: Link) -> tuple[Definition, ...]:
        self._limit = asyncio.timeout(self.server.connect_timeout)
        async with self._limit:
            found = await link.definitions()
        if found == self.listing:
            return self.listing
        log.info("MCP server %r offers %d tools", self.server.name, len(found))
        return found


class _LostError(Exception):
    """The connection ended while a call was on it."""


def pause_after(failures: int, jitter: float) -> float:
    """Return the seconds before the next attempt to connect; `jitter` lies between 0 and 1."""
    longest = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(failures - 1, 10))
    return longest * (0.5 + jitter / 2)


def reason(error: BaseException) -> str:
    """Return why a server could not be reached, in a line: of several failures the first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, FileNotFoundError):
        return f"there is no {error.filename or 'such command'!r} on this worker; install it"
    if isinstance(error, TimeoutError):
        return "it took too long to answer; see connect_timeout"
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return bool(task and task.cancelling())
