"""Sends events out of the fleet: Redis channels, and signed requests to a web server.

The caller of `deliver` remembers the last delivered event. Knows no step.
"""

import asyncio
import hashlib
import hmac
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster
from redis.exceptions import ConnectionError, RedisClusterException  # noqa: A004 - redis's own

from stepfleet.orchestrator.errors import AgentException, ConfigurationError
from stepfleet.orchestrator.events.subscribers import Envelope
from stepfleet.orchestrator.records import exact_json
from stepfleet.orchestrator.redis_client.clients import client_of

if TYPE_CHECKING:
    import httpx

HEADER = "stepfleet-signature"
TOLERANCE = 300


class SignatureError(ConfigurationError):
    """A webhook's body was not sent by the fleet, or long ago."""


def signature(secret: str, body: bytes, timestamp: int) -> str:
    """Return the header's value for a body sent at `timestamp` (seconds since 1970, UTC)."""
    return f"t={timestamp},v1={_digest(secret, body, timestamp)}"


def verify(secret: str, body: bytes, header: str, now: float, tolerance: float = TOLERANCE) -> None:
    """Return if `header` signs `body`; a receiver calls this with the body's exact bytes.

    Raises `SignatureError` for a wrong signature, and for one that is more than `tolerance`
    seconds away from `now`: a recorded request cannot be sent again later.
    """
    fields = dict(part.partition("=")[::2] for part in header.split(","))
    stamp = fields.get("t", "")
    if not stamp.isascii() or not stamp.isdigit():
        raise SignatureError(f"the header {HEADER} has no time: it reads t=SECONDS,v1=HEX")
    expected = _digest(secret, body, int(stamp))
    if not hmac.compare_digest(expected.encode(), fields.get("v1", "").encode()):
        raise SignatureError("the signature is wrong: compare the secrets of fleet and receiver")
    if abs(now - int(stamp)) > tolerance:
        raise SignatureError(f"the signature is older than {tolerance:g} s; check the clocks")


def _digest(secret: str, body: bytes, timestamp: int) -> str:
    return hmac.new(secret.encode(), b"%d." % timestamp + body, hashlib.sha256).hexdigest()


PUBLISH_SECONDS = 5.0


class RedisPubSub:
    """Publishes envelopes as JSON. Raises `redis.exceptions.RedisError` where Redis is away."""

    def __init__(self, client: "Redis | RedisCluster") -> None:
        self._client = client

    @classmethod
    def at(cls, url: str) -> Self:
        """Return a broadcaster with a connection of its own to the Redis at `url`."""
        bounds: dict[str, Any] = {
            "socket_timeout": PUBLISH_SECONDS,
            "socket_connect_timeout": PUBLISH_SECONDS,
        }
        return cls(client_of(url, **bounds))

    async def broadcast(self, channel: str, envelope: Envelope) -> None:
        """Publish one envelope."""
        try:
            await self._client.publish(channel, exact_json.dumps(dict(envelope)))
        except RedisClusterException as error:  # no node answers; not a RedisError
            raise ConnectionError(str(error)) from error

    async def aclose(self) -> None:
        """Disconnect."""
        await self._client.aclose()


WEBHOOK_SECONDS = 10.0
"""For the whole request."""
MOST_READ = 64 * 1024
"""Bytes of an answer that are read, as they come; a connection with a longer one is closed."""
PASSING = frozenset({408, 425, 429})
_OK = range(200, 300)
_REFUSED = range(400, 500)


class WebhookError(AgentException):
    """A webhook's server did not accept a request; with `lasting` it never will."""

    def __init__(self, message: str, *, lasting: bool = False) -> None:
        super().__init__(message)
        self.lasting = lasting


class Webhook:
    """Posts `{"events": [...]}` to `url`.

    Each envelope has an `event_id`; one that comes again is the same event. The body is signed
    with `secret` in the header `stepfleet-signature` (see `signing.verify`); without a secret
    it is not. Redirects are not followed.
    """

    def __init__(
        self, url: str, secret: str = "", *, clock: Callable[[], float] = time.time
    ) -> None:
        self.url = url
        self._secret = secret
        self._clock = clock
        self._client: httpx.AsyncClient | None = None

    async def broadcast(self, channel: str, envelope: Envelope) -> None:
        """Send one envelope. Raises `WebhookError` where the server does not accept it."""
        del channel
        await self.deliver([envelope])

    async def deliver(self, envelopes: Sequence[Envelope]) -> None:
        """Send envelopes in one request. Raises `WebhookError` where it is not accepted."""
        import httpx  # noqa: PLC0415 - takes long, and workers without webhooks never need it

        body = exact_json.dumps({"events": [dict(one) for one in envelopes]})
        headers: dict[str, Any] = {
            "accept-encoding": "identity",
            "content-type": "application/json",
            "user-agent": "stepfleet",
        }
        if self._secret:
            headers[HEADER] = signature(self._secret, body, int(self._clock()))
        if self._client is None:
            self._client = httpx.AsyncClient(timeout=WEBHOOK_SECONDS)
        try:
            async with asyncio.timeout(WEBHOOK_SECONDS):
                status = await _status_of(
                    self._client.stream("POST", self.url, content=body, headers=headers)
                )
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise WebhookError(f"{self._host} cannot be reached: {type(error).__name__}") from None
        if status not in _OK:
            lasting = status in _REFUSED and status not in PASSING
            raise WebhookError(f"{self._host} answered {status}", lasting=lasting)

    async def aclose(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.aclose()

    @property
    def _host(self) -> str:
        return f"the webhook at {urlsplit(self.url).hostname}"


async def _status_of(answering: "AbstractAsyncContextManager[httpx.Response]") -> int:
    """Return the status of an answer whose body is not needed.

    A short one is read, so that the connection can be used again; it is never unpacked.
    """
    async with answering as response:
        size = 0
        async for part in response.aiter_raw():
            size += len(part)
            if size > MOST_READ:
                break
        return response.status_code
