"""One connection to an MCP server: how it is made, what it lists, and when it has ended.

Knows neither agents nor runs. Whoever enters a connection must leave it in the same task.
"""

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TextIO

import httpx2
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp_types import ToolListChangedNotification

from stepfleet.orchestrator.records.text.redaction import name_secret
from stepfleet.orchestrator.tools.mcp import McpServer, ToolSourceError
from stepfleet.worker.toolbox.mcp.limits import ENCODING, IDENTITY, BoundedTransport, register_lines
from stepfleet.worker.toolbox.mcp.listing import MAX_TOOLS, Definition, definitions

MAX_PAGES = 64
HTTP_SECONDS = 30.0
STREAM_SECONDS = 300.0
"""How long a stream of the server may be silent, where calls have no longer timeout."""
CONNECTIONS = 1000

Transport = AbstractAsyncContextManager[Any]


@dataclass
class Link:
    """An open connection. `stirred` is set when it has ended or its server's tools changed."""

    client: Client
    server: McpServer
    ended: bool = False
    stirred: asyncio.Event = field(default_factory=asyncio.Event)

    def end(self) -> None:
        """Mark the connection as unusable."""
        self.ended = True
        self.stirred.set()

    async def definitions(self) -> tuple[Definition, ...]:
        """Return what the server offers. Raises what the protocol's client raises."""
        offered: list[Any] = []
        cursor: str | None = None
        for _ in range(MAX_PAGES):
            page = await self.client.list_tools(cursor=cursor, cache_mode="refresh")
            offered += page.tools
            cursor = page.next_cursor
            if cursor is None or len(offered) > 2 * MAX_TOOLS:
                break
        # Strangers' schemas are judged within bounds, and even so not where runs wait.
        return await asyncio.to_thread(definitions, self.server, offered)


@asynccontextmanager
async def connected(server: McpServer, limit: asyncio.Timeout) -> AsyncIterator[Link]:
    """Connect within `limit`, and disconnect at the end of the block.

    Raises `ToolSourceError`, `TimeoutError`, and what the transport raises.
    """
    links: list[Link] = []

    def end() -> None:
        for link in links:
            link.end()

    async def on_message(message: Any) -> None:
        # All other notifications of a server have no effect here.
        if isinstance(message, ToolListChangedNotification):
            for link in links:
                link.stirred.set()

    async with AsyncExitStack() as stack:
        async with limit:
            transport = await _transport(server, stack)
            client = Client(_watched(transport, end), message_handler=on_message, cache=None)
            links.append(Link(await stack.enter_async_context(client), server))
        yield links[0]


async def _transport(server: McpServer, stack: AsyncExitStack) -> Transport:
    if server.command:
        register_lines()
        parameters = StdioServerParameters(
            command=server.command[0],
            args=list(server.command[1:]),
            env={name: _variable(server, "env", name) for name in server.env},
            cwd=server.cwd,
            encoding=ENCODING,
        )
        log = stack.enter_context(_stderr())
        return stdio_client(parameters, log)
    # It logs every request, with its address.
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    silence = max(STREAM_SECONDS, server.timeout or 0.0)
    http = httpx2.AsyncClient(
        headers={**IDENTITY, **_headers(server)},
        timeout=httpx2.Timeout(HTTP_SECONDS, read=silence),
        transport=BoundedTransport(
            limits=httpx2.Limits(max_connections=CONNECTIONS, max_keepalive_connections=100)
        ),
    )
    return streamable_http_client(server.url, http_client=await stack.enter_async_context(http))


def _headers(server: McpServer) -> Mapping[str, str]:
    return {header: _variable(server, "header_env", name) for header, name in server.header_env}


def _variable(server: McpServer, named: str, name: str) -> str:
    value = os.environ.get(name)
    if value is None:
        raise ToolSourceError(
            f"MCP server {server.name!r}: field {named!r} names {name}, which is not set in this "
            "worker's environment; set it there"
        )
    name_secret(name)
    return value


def _stderr() -> TextIO:
    """Return a file for a server's standard error: a duplicate of this process's own."""
    # Celery puts an object without a descriptor in the place of sys.stderr.
    try:
        number = sys.__stderr__.fileno() if sys.__stderr__ else -1
    except (OSError, ValueError):
        number = -1
    if number < 0:
        return Path(os.devnull).open("w", encoding="utf-8")
    return os.fdopen(os.dup(number), "w", encoding="utf-8")


@asynccontextmanager
async def _watched(transport: Transport, end: Callable[[], None]) -> AsyncIterator[Any]:
    """Call `end` when the server's side of a transport ends, which the client does not report."""
    async with transport as (reading, writing):
        yield _Watched(reading, end), writing


def without_output_schemas(message: Any) -> Any:
    """Return a message of a server; of listed tools without the schemas of their results.

    The protocol's client would check results against them, with patterns and all, in no bounds.
    """
    result = getattr(getattr(message, "message", None), "result", None)
    tools = result.get("tools") if isinstance(result, dict) else None
    for one in tools if isinstance(tools, list) else ():
        if isinstance(one, dict):
            one.pop("outputSchema", None)
    return message


class _Watched:
    """A stream of messages that calls `end` at its end."""

    def __init__(self, stream: Any, end: Callable[[], None]) -> None:
        self._stream = stream
        self._end = end

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        try:
            message = await self._stream.__anext__()
        except BaseException:
            self._end()
            raise
        return without_output_schemas(message)

    async def __aenter__(self) -> Self:
        await self._stream.__aenter__()
        return self

    async def __aexit__(self, *raised: object) -> Any:
        return await self._stream.__aexit__(*raised)
