"""The HTTP connections of a worker process: httpx's requests over aiohttp's pool.

httpx's own pool costs time in proportion to its connections at every request; aiohttp's does
not, and a worker holds a connection per slot. What httpx's client adds above a transport
(redirects, cookies, merged defaults) is not wanted here and would double the cost of a call.
"""

import functools
import urllib.request
from collections.abc import Mapping

import aiohttp
import httpx
from httpx_aiohttp import AiohttpTransport

from stepfleet.worker.models.endpoint import is_loopback

CONNECT_SECONDS = 10.0
_KEEPALIVE_SECONDS = 30.0
_DNS_SECONDS = 60
_TIMEOUTS = {"connect": CONNECT_SECONDS}
_STANDING_HEADERS = {
    "accept": "application/json, text/event-stream",
    "accept-encoding": "identity",
    "user-agent": "stepfleet",
}
"""What every request says. Answers are short: to compress them costs more than it saves."""


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
        self._transports: dict[str | None, AiohttpTransport] = {}

    async def post(self, url: str, headers: Mapping[str, str], body: bytes) -> httpx.Response:
        """Send a request and return its answer, the body unread; the caller closes it.

        Raises `httpx.HTTPError`, `aiohttp.ClientError` or `OSError`.
        """
        address = _address(url)
        fields = httpx.Headers({**_STANDING_HEADERS, **headers}, encoding="ascii")
        request = httpx.Request(
            "POST", address, headers=fields, content=body, extensions={"timeout": _TIMEOUTS}
        )
        request.headers.encoding = "ascii"  # httpx would guess it anew at every look
        proxy = proxy_for(address, self._proxies) if self._proxies else None
        return await self._transport(proxy).handle_async_request(request)

    async def aclose(self) -> None:
        """Close all connections."""
        for transport in self._transports.values():
            await transport.aclose()
        self._transports.clear()

    def _transport(self, proxy: str | None) -> AiohttpTransport:
        if proxy not in self._transports:
            self._transports[proxy] = self._new_transport(proxy)
        return self._transports[proxy]

    def _new_transport(self, proxy: str | None) -> AiohttpTransport:
        verify = httpx.create_ssl_context()

        def session() -> aiohttp.ClientSession:
            connector = aiohttp.TCPConnector(
                limit=self._limit,
                keepalive_timeout=_KEEPALIVE_SECONDS,
                ttl_dns_cache=_DNS_SECONDS,
                ssl=verify,
            )
            return aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())

        through = httpx.Proxy(proxy) if proxy else None
        return AiohttpTransport(verify=verify, client=session, proxy=through)


def proxy_for(url: httpx.URL, proxies: Mapping[str, str]) -> str | None:
    """Return the proxy on the way to `url`; None for a direct one, as to this machine itself."""
    proxy = proxies.get(url.scheme) or proxies.get("all")
    if not proxy or is_loopback(url.host):
        return None
    # `proxy_bypass` itself asks the system on some platforms; typeshed knows only that one.
    if urllib.request.proxy_bypass_environment(url.host, dict(proxies)):  # type: ignore[attr-defined]
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


@functools.lru_cache(maxsize=256)
def _address(url: str) -> httpx.URL:
    return httpx.URL(url)
