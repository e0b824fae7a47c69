"""The HTTP connections of a worker process, over aiohttp's pool.

httpx's own pool costs time in proportion to its connections at every request, and its requests
and responses cost more than the call itself; a worker makes a call per step and holds a
connection per slot, so a model call goes straight to aiohttp.
"""

import asyncio
import functools
import urllib.request
from collections.abc import Mapping
from contextvars import ContextVar

import aiohttp
from aiohttp.client_proto import ResponseHandler
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
_COMMON_HEADERS = {
    "accept": "application/json, text/event-stream",
    "accept-encoding": "identity",
    "user-agent": "stepfleet",
}
"""Headers of every request. Answers are short: compressing them costs more than it saves."""


_kept: ContextVar[float | None] = ContextVar("_kept", default=None)
"""When this task's request got a connection that had served another one; None for a new one."""
_wants_new: ContextVar[bool] = ContextVar("_wants_new", default=False)
"""Whether this task's request is to get a new one."""


class _Pool(aiohttp.TCPConnector):
    """Notes whether a request gets a kept connection."""

    def __init__(self, limit: int) -> None:
        super().__init__(
            limit=limit, keepalive_timeout=_KEEPALIVE_SECONDS, ttl_dns_cache=_DNS_SECONDS
        )

    async def connect(
        self,
        req: aiohttp.ClientRequest,
        traces: list[aiohttp.tracing.Trace],
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109 - aiohttp's own word
    ) -> aiohttp.connector.Connection:
        """Return a connection for the request."""
        while True:
            _kept.set(0.0)
            connection = await super().connect(req, traces, timeout)
            if _kept.get() is None:
                return connection
            if not _wants_new.get():
                _kept.set(asyncio.get_running_loop().time())
                return connection
            connection.close()

    async def _create_connection(
        self,
        req: aiohttp.ClientRequest,
        traces: list[aiohttp.tracing.Trace],
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109 - aiohttp's own word
    ) -> ResponseHandler:
        _kept.set(None)
        return await super()._create_connection(req, traces, timeout)


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
        self._session: aiohttp.ClientSession | None = None

    async def post(
        self, url: str, headers: Mapping[str, str], body: bytes
    ) -> aiohttp.ClientResponse:
        """Send a request and return its answer, the body unread and as it was sent.

        The caller closes it.

        Where a kept connection turns out to have been closed, it is sent on a new one. Raises
        `aiohttp.ClientError`, `TimeoutError` when connecting takes too long, or `OSError`.
        """
        address = _address(url)
        proxy = proxy_for(address, self._proxies) if self._proxies else None
        if self._session is None:
            self._session = self._new_session()
        send = functools.partial(
            self._session.post, address, headers=headers, data=body, proxy=proxy
        )
        try:
            return await send(allow_redirects=False)
        except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as error:
            if not _was_stale(error, asyncio.get_running_loop().time()):
                raise
        before = _wants_new.set(True)
        try:
            return await send(allow_redirects=False)
        finally:
            _wants_new.reset(before)

    async def aclose(self) -> None:
        """Close all connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _new_session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=_Pool(self._limit),
            headers=_COMMON_HEADERS,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            max_line_size=_LONGEST_LINE,
            max_field_size=_LONGEST_LINE,
            max_headers=_MOST_HEADERS,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
        )


def _was_stale(error: aiohttp.ClientConnectionError, now: float) -> bool:
    """Return whether the server had closed the connection before it could have the request.

    As browsers do it: by the end of a kept connection, without a byte of an answer. One that comes
    later may be that of a server which has begun to work.
    """
    if isinstance(error.__cause__, aiohttp.ClientConnectionResetError):
        return True  # nothing was written
    if (since := _kept.get()) is None or now - since > STALE_SECONDS:
        return False
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


@functools.lru_cache(maxsize=256)
def _address(url: str) -> URL:
    # An encoded path is sent as it is: a signature is of exactly these bytes.
    return URL(url, encoded="%" in url)
