"""The HTTP connections of a worker process: aiohttp's pool and parser, without its client.

A worker makes a call per step and holds a connection per slot. aiohttp's session, request and
response, with cookies, redirects, timers and a task per body, cost twice what connection and parser
do, and each call needs the same of them: the head of its requests is made once.
"""

import asyncio
import re
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from weakref import WeakSet

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.http import HttpProcessingError
from yarl import URL

from stepfleet.orchestrator.models.endpoint import is_loopback

CONNECT_SECONDS = 10.0
_KEEPALIVE_SECONDS = 30.0
_DNS_SECONDS = 60
STALE_SECONDS = 1.0
"""A kept connection that ends so soon after a request, without a byte, had ended before it."""
_LONGEST_LINE = 64 * 1024
"""Bytes of a line in the head of an answer."""
_MOST_HEADERS = 1024
_MOST_TARGETS = 64
_INTERIM = frozenset({100, *range(102, 200)})
_NOT_IN_A_HEADER = re.compile(r"[\0-\x08\n-\x1f\x7f]")
_COMMON_HEADERS = {
    "accept": "application/json, text/event-stream",
    "accept-encoding": "identity",
    "user-agent": "stepfleet",
}
"""Headers of every request. Answers are short: compressing them costs more than it saves."""


class UnreadableHeadError(aiohttp.ClientError):
    """The head of an answer is not HTTP, or out of bounds."""


@dataclass(slots=True)
class HttpAnswer:
    """The answer to a request, its body unread and as it was sent."""

    status: int
    headers: Mapping[str, str]
    content: aiohttp.StreamReader
    _connection: aiohttp.connector.Connection

    def release(self) -> None:
        """Give the connection back; one whose body was not read to its end is closed."""
        self._connection.release()


class _Target:
    """Where requests go, and what all of them begin with."""

    def __init__(self, address: URL, headers: Mapping[str, str], proxy: str | None) -> None:
        given = {name.lower() for name in headers}
        common = {name: value for name, value in _COMMON_HEADERS.items() if name not in given}
        self.request = aiohttp.ClientRequest(
            "POST",
            address,
            headers={**common, **headers},
            proxy=None if proxy is None else URL(proxy),
            loop=asyncio.get_running_loop(),
        )

    @cached_property
    def head(self) -> bytes:
        """The head of a request, but for its length; with what connecting has added for a proxy."""
        request = self.request
        is_whole = request.proxy is not None and not request.is_ssl()
        lines = [f"POST {request.url if is_whole else request.url.raw_path_qs} HTTP/1.1"]
        lines += [f"{k}: {v}" for k, v in request.headers.items() if k.lower() != "content-length"]
        if any(map(_NOT_IN_A_HEADER.search, lines)):
            raise ValueError("a header has a line break or another control character in it")
        return "\r\n".join([*lines, "content-length: "]).encode()


class _Pool(aiohttp.TCPConnector):
    """Knows which connections have served no request so far."""

    def __init__(self, limit: int) -> None:
        super().__init__(
            limit=limit, keepalive_timeout=_KEEPALIVE_SECONDS, ttl_dns_cache=_DNS_SECONDS
        )
        self._new: WeakSet[ResponseHandler] = WeakSet()
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)

    async def take(
        self, target: _Target, *, wants_new: bool
    ) -> tuple[aiohttp.connector.Connection, ResponseHandler, bool]:
        """Return a connection, its protocol, and whether it is new."""
        while True:
            try:
                connection = await self.connect(target.request, [], self._timeout)
            except TimeoutError as error:
                said = f"Connection timeout to host {target.request.url}"
                raise aiohttp.ConnectionTimeoutError(said) from error
            protocol = connection.protocol
            if protocol is None or protocol.transport is None:
                connection.close()
                raise aiohttp.ClientConnectionResetError("it was closed at once")
            is_new = protocol in self._new
            self._new.discard(protocol)
            if is_new or not wants_new:
                return connection, protocol, is_new
            connection.close()

    async def _create_connection(
        self,
        req: aiohttp.ClientRequest,
        traces: list[aiohttp.tracing.Trace],
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109 - aiohttp's own word
    ) -> ResponseHandler:
        protocol = await super()._create_connection(req, traces, timeout)
        self._new.add(protocol)
        return protocol


class Connections:
    """At most `limit` connections open at once (0: no limit), kept and shared by all calls.

    `proxies` maps schemes to proxy addresses and `no` to excepted hosts; the environment's
    (HTTPS_PROXY, NO_PROXY, ...) by default. Redirects are not followed and cookies not kept.
    There is no timeout but for connecting: each call has a deadline of its own. Belongs to the
    event loop that first uses it.
    """

    def __init__(self, limit: int = 0, proxies: Mapping[str, str] | None = None) -> None:
        self._limit = limit
        self._proxies = dict(urllib.request.getproxies() if proxies is None else proxies)
        self._pool: _Pool | None = None
        self._targets: dict[tuple[object, ...], _Target] = {}

    async def post(self, url: str, headers: Mapping[str, str], body: bytes) -> HttpAnswer:
        """Send a request and return its answer, which the caller releases.

        Where a kept connection turns out to have been closed, it is sent on a new one. Raises
        `aiohttp.ClientError`, `TimeoutError` when connecting takes too long, or `OSError`.
        """
        if self._pool is None:
            self._pool = _Pool(self._limit)
        target = self._target(url, headers)
        connection, protocol, is_new = await self._pool.take(target, wants_new=False)
        sent = asyncio.get_running_loop().time()
        try:
            return await _exchange(connection, protocol, target, body)
        except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as error:
            seconds = asyncio.get_running_loop().time() - sent
            if is_new or seconds > STALE_SECONDS or not _was_stale(error):
                raise
        connection, protocol, _ = await self._pool.take(target, wants_new=True)
        return await _exchange(connection, protocol, target, body)

    async def aclose(self) -> None:
        """Close all connections."""
        pool, self._pool = self._pool, None
        self._targets.clear()
        if pool is not None:
            await pool.close()

    def _target(self, url: str, headers: Mapping[str, str]) -> _Target:
        key = (url, *headers.items())
        if (known := self._targets.get(key)) is not None:
            return known
        if len(self._targets) >= _MOST_TARGETS:  # signed requests are all different
            self._targets.clear()
        address = _address(url)
        proxy = proxy_for(address, self._proxies) if self._proxies else None
        return self._targets.setdefault(key, _Target(address, headers, proxy))


async def _exchange(
    connection: aiohttp.connector.Connection, protocol: ResponseHandler, to: _Target, body: bytes
) -> HttpAnswer:
    """Send a request and return the head of its answer."""
    try:
        protocol.set_response_params(
            read_until_eof=True,
            auto_decompress=False,
            max_line_size=_LONGEST_LINE,
            max_field_size=_LONGEST_LINE,
            max_headers=_MOST_HEADERS,
        )
        transport = protocol.transport
        assert transport is not None  # noqa: S101 - it was there, and nothing waited
        transport.writelines([to.head, b"%d\r\n\r\n" % len(body), body])
        message, content = await protocol.read()
        while message.code in _INTERIM:
            message, content = await protocol.read()
    except BaseException as error:
        connection.close()
        if isinstance(error, HttpProcessingError):
            raise UnreadableHeadError(error.message) from None
        raise
    content.on_eof(partial(_give_back, connection, transport))
    return HttpAnswer(message.code, message.headers, content, connection)


def _give_back(connection: aiohttp.connector.Connection, transport: asyncio.WriteTransport) -> None:
    """Let others have the connection of an answer, unless its request is not yet sent whole."""
    if transport.get_write_buffer_size():
        connection.close()
    else:
        connection.release()


def _was_stale(error: aiohttp.ClientConnectionError) -> bool:
    """Return whether a server had closed a kept connection before it could have the request.

    As browsers do it: by its end soon after, without a byte of an answer. One that comes later may
    be that of a server which has begun to work.
    """
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return isinstance(error.message, str)  # else it is what came of an answer
    return isinstance(error.__cause__, ConnectionResetError | BrokenPipeError)


def proxy_for(url: URL, proxies: Mapping[str, str]) -> str | None:
    """Return the proxy on the way to `url`; None for a direct one, as to this machine itself."""
    host = url.host or ""
    proxy = proxies.get(url.scheme) or proxies.get("all")
    if not proxy or is_loopback(host):
        return None
    # `proxy_bypass` itself asks the system on some platforms; typeshed knows only that one.
    if urllib.request.proxy_bypass_environment(host, dict(proxies)):  # type: ignore[attr-defined]
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


@lru_cache(maxsize=256)
def _address(url: str) -> URL:
    # An encoded path is sent as it is: a signature is of exactly these bytes.
    return URL(url, encoded="%" in url)
