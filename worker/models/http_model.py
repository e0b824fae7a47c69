"""The I/O path of every provider over HTTP: one exchange, its deadline, its limits, its failures.

A provider's format decides what to send and what answers and refusals mean. Knows nothing of
retries: a transient failure is only marked as such.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol, TypeVar

import aiohttp

from stepfleet.orchestrator.errors import ModelError, ModelTimeoutError
from stepfleet.orchestrator.models.endpoint import Endpoint, endpoint_of
from stepfleet.orchestrator.models.failures import failed_event, redact, refusal
from stepfleet.orchestrator.models.llm import LLM
from stepfleet.orchestrator.models.routes import Route
from stepfleet.orchestrator.models.services import Service
from stepfleet.orchestrator.models.support import support_at
from stepfleet.orchestrator.records.errors import ModelErrorCode
from stepfleet.orchestrator.records.responses import LLMResponse, ModelRequest, ModelSettings
from stepfleet.orchestrator.records.usage import UsageStats
from stepfleet.worker.models.blocks import fitted
from stepfleet.worker.models.connections import Connections
from stepfleet.worker.models.signing import Signer
from stepfleet.worker.models.tokens import Tokens

_FIELDS = (b":", b"event:", b"id:", b"retry:")


class EventLines:
    """Cuts a byte stream into the data of its server-sent events."""

    def __init__(self) -> None:
        self._begun: list[bytes] = []
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> list[bytes]:
        """Take the next bytes and return the data of every event that they complete."""
        head, newline, rest = chunk.rpartition(b"\n")
        if not newline:
            self._begun.append(chunk)
            return []
        lines = b"".join([*self._begun, head]).split(b"\n")
        self._begun = [rest]
        return [data for line in lines for data in self._line(line.rstrip(b"\r"))]

    def end(self) -> list[bytes]:
        """Return the data of an event that the stream's end completes."""
        return self.feed(b"\n\n")

    def _line(self, line: bytes) -> Iterator[bytes]:
        if line.startswith(b"data:"):
            self._data.append(line[5:].removeprefix(b" "))
        elif not line and self._data:
            yield b"\n".join(self._data)
            self._data.clear()
        elif line and self._data and self._is_cut() and not line.startswith(_FIELDS):
            # A line break that the server did not escape: the text goes on.
            self._data.append(line)

    def _is_cut(self) -> bool:
        last = self._data[-1].rstrip()
        return self._data[0].startswith(b"{") and not last.endswith(b"}")


RESPONSE_LIMIT = 16 * 1024 * 1024
"""Largest answer that is read, in bytes."""

LARGE_ANSWER = 64 * 1024
"""Answers from so many bytes on are read on a thread: hostile ones take seconds."""

_REQUEST_IDS = (
    "x-request-id", "request-id", "x-amzn-requestid", "apim-request-id", "responseId",
)  # fmt: skip
_LONGEST_ID = 128
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
_AT_ONCE = 16 * 1024
"""Bytes of a stream between which others have their turn: they may be thousands of events."""
OnHeaders = Callable[[ModelRequest, Mapping[str, str], float], None]
"""Gets a request, the headers of its answer, and the seconds until they came."""


class Cutter(Protocol):
    """Cuts the bytes of a stream into events."""

    def feed(self, chunk: bytes) -> list[bytes]:
        """Take the next bytes and return every event that they complete.

        Raises `ModelError` for bytes that are no such stream.
        """

    def end(self) -> list[bytes]:
        """Return what the stream's end completes."""


class StreamedAnswer(Protocol):
    """An answer that arrives in events."""

    error: dict[str, Any] | None
    """The payload of a failure that came as an event."""
    usage: Any
    """The provider's token counts."""

    @property
    def size(self) -> int:
        """How many characters of text and calls it has."""

    @property
    def is_over(self) -> bool:
        """Whether nothing of interest follows."""

    def add(self, data: bytes) -> str:
        """Add one event and return the piece of text in it. Raises `ModelError` if malformed."""

    def payload(self) -> dict[str, Any]:
        """Return the whole answer. Raises `ModelError` when the stream broke off."""


@dataclass(frozen=True, slots=True)
class Format:
    """How the requests and answers of one protocol look: pure functions.

    `parse` reads an unstreamed body; `response` gets what it returned, or a stream's payload, and
    the name of the requested model. `failed` says whether a 200 answer is a failure. Streams are
    of `stream_type`, and `cutter` finds their events.
    """

    route: Route
    body: Callable[[ModelRequest, Endpoint], bytes]
    parse: Callable[[bytes], dict[str, Any]]
    stream: Callable[[], StreamedAnswer]
    usage: Callable[[Any], UsageStats | None]
    response: Callable[[dict[str, Any], str], LLMResponse]
    failed: Callable[[dict[str, Any]], bool]
    usage_field: str = "usage"
    stream_type: str = "text/event-stream"
    cutter: Callable[[], Cutter] = EventLines


@dataclass
class Received:
    """How much of an answer had received when the call failed: bytes, characters, its usage."""

    size: int = 0
    text: int = 0
    usage: UsageStats | None = None
    request_id: str = ""

    @property
    def tokens(self) -> int:
        """About how many tokens that is; of a stream only its text counts."""
        return (self.text or self.size) // _BYTES_PER_TOKEN


class HttpModel(LLM):
    """Models of one service, which speaks the protocol of `format`.

    `connections` are shared and stay the caller's to close. `environment` (the process's own by
    default) has addresses and keys where the request's settings name none. `response_limit` is in
    bytes.
    """

    def __init__(
        self,
        service: Service,
        format: Format,  # noqa: A002 - the field's word
        connections: Connections,
        *,
        environment: Mapping[str, str] | None = None,
        response_limit: int = RESPONSE_LIMIT,
        on_headers: OnHeaders | None = None,
    ) -> None:
        self._on_headers = on_headers
        self._service = service
        self._format = format
        self._connections = connections
        self._environment = os.environ if environment is None else environment
        self._response_limit = response_limit
        self._endpoints: dict[tuple[str | None, ...], Endpoint] = {}
        self._signer = Signer()
        self._tokens = Tokens()

    async def generate(self, request: ModelRequest) -> LLMResponse:
        """Answer the request; streamed underneath if its settings say so, with an equal result.

        Raises `ModelError` or a subclass; `ModelTimeoutError` after `settings.timeout` seconds.
        """
        return await self.generate_streaming(request, _ignore)

    async def generate_streaming(
        self, request: ModelRequest, on_text: Callable[[str], None]
    ) -> LLMResponse:
        """Answer like `generate` and pass each piece of text to `on_text` as it arrives.

        Pieces arrive only when `settings.stream` is set.
        """
        endpoint = self._endpoint(request.settings)
        seconds = request.settings.timeout
        deadline = asyncio.timeout(seconds)
        received = Received()
        try:
            async with deadline:
                payload = await self._exchange(endpoint, request, on_text, received)
            answer = await _read(received.size, self._format.response, payload, request.model)
            if answer.content and not received.text:  # the service does not stream this one
                on_text(answer.content)
            name = received.request_id or _request_id(payload)
            return answer.model_copy(update={"request_id": name}) if name else answer
        except _BROKEN as error:
            if deadline.expired():
                msg = f"no answer from {endpoint.host} within {seconds:g} s (settings.timeout)"
                # Where nothing came, the next attempt gives a better estimate of its usage.
                failure: ModelError = ModelTimeoutError(msg, received=received.tokens or None)
            else:
                reason = redact(f"{type(error).__name__}: {error}", endpoint.key)
                failure = ModelError(
                    f"connection to {endpoint.host}: {reason}",
                    retryable=True,
                    code=ModelErrorCode.CONNECTION_ERROR,
                    received=None if isinstance(error, _NOT_SENT) else received.tokens,
                )
        except ModelError as error:
            if error.received is not None or received.text:
                error.received, error.usage = received.tokens, received.usage
            if received.request_id:
                error.name_request(received.request_id)
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

    def address(self, settings: ModelSettings) -> str:
        """Return the address of the service. Raises `ModelSetupError`."""
        return self._endpoint(settings).url.removesuffix(self._format.route.path)

    def _endpoint(self, settings: ModelSettings) -> Endpoint:
        # The environment of a process stays as it is; reading it costs at every step.
        key = (settings.base_url, settings.api_key_env, settings.organization)
        if key not in self._endpoints:
            self._endpoints[key] = endpoint_of(
                settings,
                self._environment,
                self._service,
                path=self._format.route.path,
                headers={"content-type": "application/json", **self._format.route.headers},
            )
        return self._endpoints[key]

    async def _exchange(
        self,
        endpoint: Endpoint,
        request: ModelRequest,
        on_text: Callable[[str], None],
        received: Received,
    ) -> dict[str, Any]:
        messages = fitted(request.messages, support_at(self._service, request.model))
        if messages is not request.messages:
            request = request.model_copy(update={"messages": messages})
        body = self._format.body(request, endpoint)
        url = self._format.route.url(endpoint, request.model, request.settings.stream)
        if endpoint.tokens:
            endpoint = await self._tokens.opened(endpoint)
        headers = endpoint.headers
        if endpoint.region:
            headers = await self._signer.signed(endpoint.region, url, headers, body)
        clock = asyncio.get_running_loop().time
        sent = clock()
        response = await self._connections.post(url, headers, body)
        if self._on_headers is not None:
            self._on_headers(request, response.headers, clock() - sent)
        received.request_id = _request_id(response.headers)
        try:
            if response.status // 100 != _SUCCESS:
                raise await self._refused(response, endpoint)
            if response.headers.get("content-type", "").startswith(self._format.stream_type):
                payload = await self._assemble(response, on_text, received)
            else:
                parts = self._parts(response, received)
                answer = b"".join([part async for part in parts])
                payload = await _read(received.size, self._format.parse, answer)
                received.usage = self._format.usage(payload.get(self._format.usage_field))
        finally:
            response.release()
        if self._format.failed(payload):
            raise failed_event(payload, host=endpoint.host, key=endpoint.key)
        return payload

    async def _assemble(
        self, response: aiohttp.ClientResponse, on_text: Callable[[str], None], received: Received
    ) -> dict[str, Any]:
        cutter, answer = self._format.cutter(), self._format.stream()

        async def take(events: list[bytes]) -> None:
            try:
                for data in events:
                    if answer.is_over:
                        return
                    if piece := await _read(len(data), answer.add, data):
                        on_text(piece)
            finally:
                received.text = answer.size
                received.usage = self._format.usage(answer.usage)

        parts = self._parts(response, received)
        async for part in parts:
            for first in range(0, len(part), _AT_ONCE):
                await take(cutter.feed(part[first : first + _AT_ONCE]))
                if first + _AT_ONCE < len(part):
                    await asyncio.sleep(0)
            if answer.is_over:
                await _read_out(parts)
                break
        await take(cutter.end())
        return answer.error or answer.payload()

    async def _parts(
        self, response: aiohttp.ClientResponse, received: Received
    ) -> AsyncIterator[bytes]:
        async for part in response.content.iter_any():
            received.size += len(part)
            if received.size > self._response_limit:
                msg = f"the answer is longer than the limit of {self._response_limit} B"
                raise ModelError(msg, code=ModelErrorCode.MALFORMED_ANSWER, received=0)
            yield part

    async def _refused(self, response: aiohttp.ClientResponse, endpoint: Endpoint) -> ModelError:
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
            variable=endpoint.variable,
        )


def _request_id(given: Mapping[str, Any]) -> str:
    """Return the provider's name of a request: of its headers, or of an answer that has it."""
    found = (given.get(name) for name in _REQUEST_IDS)
    name = next((one for one in found if isinstance(one, str)), "")
    return name[:_LONGEST_ID] if name.isascii() and name.isprintable() else ""


async def _read(size: int, read: Callable[..., R], *args: Any) -> R:
    """Return `read(*args)` for an answer of `size` bytes; a large one blocks no event loop."""
    return await asyncio.to_thread(read, *args) if size >= LARGE_ANSWER else read(*args)


async def _read_out(parts: AsyncIterator[bytes]) -> None:
    # The answer is whole. Only a connection whose last bytes were read can be used again.
    with contextlib.suppress(*_BROKEN, ModelError):
        async with asyncio.timeout(_READ_OUT_SECONDS):
            async for _ in parts:
                pass


def _ignore(_piece: str) -> None:
    """Drop a piece that nobody waits for."""
