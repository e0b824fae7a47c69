"""OpenAI's chat completions and everything compatible with them, over shared connections.

Does the I/O; what to send, what an answer means and what a failure amounts to are decided by
the pure modules beside it. Knows nothing of retries: a transient failure is only marked so.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

import aiohttp

from stepfleet.orchestrator.errors import ModelError, ModelTimeoutError
from stepfleet.orchestrator.models.llm import LLM
from stepfleet.orchestrator.records.errors import ModelErrorCode
from stepfleet.orchestrator.records.responses import LLMResponse, ModelRequest, ModelSettings
from stepfleet.orchestrator.records.usage import UsageStats
from stepfleet.worker.models.connections import Connections
from stepfleet.worker.models.endpoint import Endpoint, endpoint_of
from stepfleet.worker.models.openai.answer import parse_body, parse_completion, usage_of
from stepfleet.worker.models.openai.failures import failed_event, redact, refusal
from stepfleet.worker.models.openai.format import encode, request_body
from stepfleet.worker.models.openai.stream import EventLines, StreamedCompletion

RESPONSE_LIMIT = 16 * 1024 * 1024
"""Largest answer that is read, in bytes."""

LARGE_ANSWER = 64 * 1024
"""Answers from so many bytes on are read on a thread: hostile ones take seconds."""

_ERROR_LIMIT = 64 * 1024
_READ_OUT_SECONDS = 0.25
_SUCCESS = 2  # hundred and something
_BROKEN = (aiohttp.ClientError, OSError)
R = TypeVar("R")
_NOT_SENT = (
    aiohttp.ClientConnectorError,
    aiohttp.ClientHttpProxyError,
    aiohttp.ConnectionTimeoutError,
    aiohttp.InvalidURL,
)
_BYTES_PER_TOKEN = 4


@dataclass
class Arrived:
    """What of an answer had come when the call failed: bytes, characters of text, its usage."""

    size: int = 0
    text: int = 0
    usage: UsageStats | None = None

    @property
    def tokens(self) -> int:
        """About how many tokens that is; of a stream only what it says counts."""
        return (self.text or self.size) // _BYTES_PER_TOKEN


class OpenAI(LLM):
    """Models behind `POST {base_url}/chat/completions`.

    `connections` are shared and stay the caller's to close. The address, key and organization
    come from the request's settings, then from `environment` (the process's own by default):
    OPENAI_BASE_URL, OPENAI_API_KEY, OPENAI_ORG_ID. `response_limit` is in bytes.
    """

    def __init__(
        self,
        connections: Connections,
        *,
        environment: Mapping[str, str] | None = None,
        response_limit: int = RESPONSE_LIMIT,
    ) -> None:
        self._connections = connections
        self._environment = os.environ if environment is None else environment
        self._response_limit = response_limit
        self._endpoints: dict[tuple[str | None, ...], Endpoint] = {}

    async def generate(self, request: ModelRequest) -> LLMResponse:
        """Answer the request; streamed underneath if its settings say so, with an equal result.

        Raises `ModelError` or a subclass; `ModelTimeoutError` after `settings.timeout` seconds.
        """
        return await self.generate_streaming(request, _ignore)

    async def generate_streaming(
        self, request: ModelRequest, on_text: Callable[[str], None]
    ) -> LLMResponse:
        """Answer like `generate` and tell `on_text` each piece of text as it arrives.

        Pieces arrive only when `settings.stream` is set.
        """
        endpoint = self._endpoint(request.settings)
        seconds = request.settings.timeout
        deadline = asyncio.timeout(seconds)
        arrived = Arrived()
        try:
            async with deadline:
                payload = await self._exchange(endpoint, request, on_text, arrived)
            return await _aside(arrived.size, parse_completion, payload, request.model)
        except _BROKEN as error:
            if deadline.expired():
                msg = f"no answer from {endpoint.host} within {seconds:g} s (settings.timeout)"
                # Where nothing came, the call that is made in its place tells more than a guess.
                failure: ModelError = ModelTimeoutError(msg, received=arrived.tokens or None)
            else:
                said = redact(f"{type(error).__name__}: {error}", endpoint.key)
                failure = ModelError(
                    f"connection to {endpoint.host}: {said}",
                    retryable=True,
                    code=ModelErrorCode.CONNECTION_ERROR,
                    received=None if isinstance(error, _NOT_SENT) else arrived.tokens,
                )
        except ModelError as error:
            if error.received is not None or arrived.text:
                error.received, error.usage = arrived.tokens, arrived.usage
            raise
        # Raised out here because the foreign exception may hold the request's headers.
        raise failure

    async def stream(self, request: ModelRequest) -> AsyncIterator[str]:
        """Yield the answer's text in pieces, streamed whatever the settings say."""
        settings = request.settings.model_copy(update={"stream": True})
        pieces: asyncio.Queue[str | None] = asyncio.Queue()
        call = asyncio.ensure_future(
            self.generate_streaming(
                request.model_copy(update={"settings": settings}), pieces.put_nowait
            )
        )
        call.add_done_callback(lambda _: pieces.put_nowait(None))
        try:
            while (piece := await pieces.get()) is not None:
                yield piece
            await call
        finally:
            call.cancel()
            with contextlib.suppress(asyncio.CancelledError, ModelError):
                await call

    def _endpoint(self, settings: ModelSettings) -> Endpoint:
        # The environment of a process stays as it is; reading it costs at every step.
        asked = (settings.base_url, settings.api_key_env, settings.organization)
        if asked not in self._endpoints:
            self._endpoints[asked] = endpoint_of(settings, self._environment)
        return self._endpoints[asked]

    async def _exchange(
        self,
        endpoint: Endpoint,
        request: ModelRequest,
        on_text: Callable[[str], None],
        arrived: Arrived,
    ) -> dict[str, Any]:
        body = encode(request_body(request, official=endpoint.official))
        response = await self._connections.post(endpoint.url, endpoint.headers, body)
        try:
            if response.status // 100 != _SUCCESS:
                raise await _refused(response, endpoint)
            if response.headers.get("content-type", "").startswith("text/event-stream"):
                payload = await self._assemble(response, on_text, arrived)
            else:
                parts = self._parts(response, arrived)
                answer = b"".join([part async for part in parts])
                payload = await _aside(arrived.size, parse_body, answer)
                arrived.usage = usage_of(payload.get("usage"))
        finally:
            response.release()
        if payload.get("error") and not payload.get("choices"):
            raise failed_event(payload, host=endpoint.host, key=endpoint.key)
        return payload

    async def _assemble(
        self, response: aiohttp.ClientResponse, on_text: Callable[[str], None], arrived: Arrived
    ) -> dict[str, Any]:
        lines, completion = EventLines(), StreamedCompletion()

        async def take(events: list[bytes]) -> None:
            try:
                for data in events:
                    if completion.is_over:
                        return
                    if piece := await _aside(len(data), completion.add, data):
                        on_text(piece)
            finally:
                arrived.text, arrived.usage = completion.size, usage_of(completion.usage)

        parts = self._parts(response, arrived)
        async for part in parts:
            await take(lines.feed(part))
            if completion.is_over:
                await _read_out(parts)
                break
        await take(lines.end())
        return completion.error or completion.payload()

    async def _parts(
        self, response: aiohttp.ClientResponse, arrived: Arrived
    ) -> AsyncIterator[bytes]:
        async for part in response.content.iter_any():
            arrived.size += len(part)
            if arrived.size > self._response_limit:
                msg = f"the answer is longer than the limit of {self._response_limit} B"
                raise ModelError(msg, code=ModelErrorCode.MALFORMED_ANSWER, received=0)
            yield part


async def _aside(size: int, read: Callable[..., R], *args: Any) -> R:
    """Return what `read` makes of an answer of `size` bytes; a large one blocks no event loop."""
    return await asyncio.to_thread(read, *args) if size >= LARGE_ANSWER else read(*args)


async def _read_out(parts: AsyncIterator[bytes]) -> None:
    # The answer is whole. Only a connection whose last bytes were read can be used again.
    with contextlib.suppress(*_BROKEN, ModelError):
        async with asyncio.timeout(_READ_OUT_SECONDS):
            async for _ in parts:
                pass


async def _refused(response: aiohttp.ClientResponse, endpoint: Endpoint) -> ModelError:
    body = b""
    async for part in response.content.iter_any():
        body += part
        if len(body) >= _ERROR_LIMIT:
            break
    return refusal(
        response.status,
        response.headers,
        body[:_ERROR_LIMIT],
        host=endpoint.host,
        key=endpoint.key,
        now=datetime.now(UTC),
    )


def _ignore(_piece: str) -> None:
    """Take a piece that nobody waits for."""
