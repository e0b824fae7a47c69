"""Sends events to a web server: signed, in order, several in one request.

Knows no Redis: the caller of `deliver` remembers the last delivered event.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from stepfleet.orchestrator.errors import AgentException
from stepfleet.orchestrator.events.broadcast.port import Envelope
from stepfleet.orchestrator.events.broadcast.signing import HEADER, signature
from stepfleet.orchestrator.records import exact_json

if TYPE_CHECKING:
    import httpx

SECONDS = 10.0
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
            self._client = httpx.AsyncClient(timeout=SECONDS)
        try:
            async with asyncio.timeout(SECONDS):
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
