"""The I/O path of every provider over HTTP: one exchange, its deadline, its limits, its failures.

A provider's format decides what to send and what answers and refusals mean. Knows nothing of
retries: a transient failure is only marked as such.
"""

import asyncio
import contextlib
import os
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol, TypeVar

import aiohttp

from stepfleet.orchestrator.errors import ModelError, ModelTimeoutError
from stepfleet.orchestrator.models.endpoint import Endpoint, ModelSetupError, Route, endpoint_of
from stepfleet.orchestrator.models.failures import failed_event, redact, refusal
from stepfleet.orchestrator.models.llm import LLM
from stepfleet.orchestrator.models.services import Api, Service
from stepfleet.orchestrator.models.signing import Credentials
from stepfleet.orchestrator.models.support import support_at
from stepfleet.orchestrator.records.calls.tools import ToolCall, ToolSpec
from stepfleet.orchestrator.records.errors import ModelErrorCode
from stepfleet.orchestrator.records.responses import LLMResponse, ModelRequest, ModelSettings
from stepfleet.orchestrator.records.usage import UsageStats
from stepfleet.worker.models.blocks import fitted, with_sent_ids
from stepfleet.worker.models.bodies import malformed, with_counts, without_half_a_turn
from stepfleet.worker.models.connections import Connections, HttpAnswer, UnreadableHeadError
from stepfleet.worker.models.event_lines import Body, EventLines
from stepfleet.worker.models.tokens import Tokens

_LARGE = 256 * 1024
"""Bodies of at least this many bytes are signed on a thread."""


class Signer:
    """Signs the calls of one event loop. One refresh runs at once, however many calls wait."""

    def __init__(self) -> None:
        self._credentials = Credentials()
        self._refresh: asyncio.Task[None] | None = None

    async def signed(
        self, region: str, url: str, headers: Mapping[str, str], body: bytes
    ) -> Mapping[str, str]:
        """Return the headers of a signed POST.

        Raises `ModelSetupError` where there are no credentials, and a transient `ModelError` where
        their source fails.
        """
        if self._credentials.are_ageing:
            if self._refresh is None or self._refresh.done():
                self._refresh = asyncio.create_task(self._refreshed())
                self._refresh.add_done_callback(_seen)
            if self._credentials.are_late:
                await self._finished(self._refresh)
        if len(body) < _LARGE:
            return self._credentials.sign(region, url, headers, body)
        return await asyncio.to_thread(self._credentials.sign, region, url, headers, body)

    async def _refreshed(self) -> None:
        await asyncio.to_thread(self._credentials.refresh)

    @staticmethod
    async def _finished(refresh: asyncio.Task[None]) -> None:
        try:
            # The call may be cancelled; the refresh is every call's.
            await asyncio.shield(refresh)
        except ModelSetupError as error:
            raise ModelSetupError(error.message) from None  # one for each call that waits
        except ModelError as error:
            code = ModelErrorCode.CONNECTION_ERROR
            raise ModelError(error.message, retryable=True, code=code) from None


def _seen(refresh: asyncio.Task[None]) -> None:
    """Take the error of a refresh that no call waits for: the next call tries again."""
    if not refresh.cancelled():
        refresh.exception()


_MARKED = re.compile(r"(?:functions\.)?(.*?)(?::\d{1,4})?(?:<\|.*)?", re.DOTALL)


def with_offered_names(answer: LLMResponse, tools: Iterable[ToolSpec]) -> LLMResponse:
    """Return an answer whose calls have no marks in their names, where a tool is meant."""
    calls = answer.tool_calls or ()
    offered = {one.name for one in tools}
    if all(call.name in offered for call in calls):
        return answer
    return answer.model_copy(update={"tool_calls": tuple(_named(call, offered) for call in calls)})


def _named(call: ToolCall, offered: set[str]) -> ToolCall:
    found = _MARKED.fullmatch(call.name)
    meant = found[1].strip() if found else ""
    if call.name in offered or meant not in offered:
        return call
    return call.model_copy(update={"name": meant})


_BOM = b"\xef\xbb\xbf"
_LONGEST_FIELD = 6
"""Bytes that tell what a body is: an object, or a line of a stream."""
_MOST_BLANKS = 4096
"""Bytes before the first sign of an answer that are waited for."""

RESPONSE_LIMIT = 16 * 1024 * 1024
"""Largest answer that is read, in bytes."""

LARGE_ANSWER = 64 * 1024
"""Answers of at least this many bytes are read on a thread: hostile ones take seconds."""

_REQUEST_IDS = ("x-request-id", "request-id", "x-amzn-requestid", "apim-request-id")
"""Headers that name a request."""
_NAMED_IN_BODY = "responseId"
"""Google's name of a request, in its answer."""
_LONGEST_ID = 128
_ERROR_LIMIT = 64 * 1024
_READ_OUT_SECONDS = 0.25
GRACE_SECONDS = 2.0
"""How long more of a stream is awaited whose answer is finished: its usage, and its end."""
_SUCCESS = 2  # hundred and something
_BROKEN = (aiohttp.ClientError, OSError)
R = TypeVar("R")
_NOT_SENT = (
    aiohttp.ClientConnectionResetError,
    aiohttp.ClientConnectorError,
    aiohttp.ClientHttpProxyError,
    aiohttp.ConnectionTimeoutError,
    aiohttp.InvalidURL,
)
_BYTES_PER_TOKEN = 4
_LONGEST_EXCERPT = 200
_AT_ONCE = 16 * 1024
"""Bytes of a stream between which others have their turn: they may be thousands of events."""
OnHeaders = Callable[[ModelRequest, Mapping[str, str], float], None]
"""Gets a request, the headers of its answer, and the seconds until they came."""


class Cutter(Protocol):
    """Cuts the bytes of a stream into events."""

    @staticmethod
    def fits(begin: bytes) -> bool:
        """Return whether a body that begins so is such a stream."""

    def feed(self, chunk: bytes) -> list[bytes]:
        """Take the next bytes and return every event that they complete.

        Raises `ModelError` for bytes that are not such a stream.
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

    @property
    def finished(self) -> bool:
        """Whether its own finish reason has come: then it is whole, whatever else may follow."""

    def add(self, data: bytes) -> str:
        """Add one event and return the piece of text in it. Raises `ModelError` if malformed."""

    def payload(self) -> dict[str, Any]:
        """Return the whole answer. Raises `ModelError` when the stream broke off."""


@dataclass(frozen=True, slots=True)
class Format:
    """How the requests and answers of one protocol look: pure functions.

    `parse` reads an unstreamed body; `response` gets what it returned, or a stream's payload, and
    the name of the requested model. `failure` returns the error that a 200 answer holds. Streams
    are of `stream_type`, and `cutter` finds their events.
    """

    route: Route
    body: Callable[[ModelRequest, Endpoint], bytes]
    parse: Callable[[bytes], dict[str, Any]]
    stream: Callable[[], StreamedAnswer]
    usage: Callable[[Any], UsageStats | None]
    response: Callable[[dict[str, Any], str], LLMResponse]
    failure: Callable[[dict[str, Any]], dict[str, Any] | None]
    usage_field: str = "usage"
    stream_type: str = "text/event-stream"
    cutter: type[Cutter] = EventLines


def _no_usage(_: Any) -> None:
    """Read the report of an answer whose usage is of no use."""


@dataclass(slots=True)
class Received:
    """How much of an answer had received when the call failed: bytes, characters, its usage.

    `is_whole` is set where nothing is missing: then the usage counts all of it. Of `size`, all
    bytes, `blank` are those of parts that have none but spaces and line ends. `report` is the
    provider's of its tokens, and `read_usage` reads it.
    """

    read_usage: Callable[[Any], UsageStats | None] = _no_usage
    report: Any = None
    size: int = 0
    blank: int = 0
    is_stream: bool = False
    text: int = 0
    request_id: str = ""
    is_whole: bool = False

    @property
    def usage(self) -> UsageStats | None:
        """The token counts that were reported."""
        return self.read_usage(self.report)

    @property
    def tokens(self) -> int:
        """About how many tokens came that a usage may lack; of a stream only its text counts."""
        if self.usage is not None:
            return 0 if self.is_whole else self.text // _BYTES_PER_TOKEN
        said = self.text if self.is_stream else self.size - self.blank
        return said // _BYTES_PER_TOKEN


class _Parts:
    """The parts of a body, unpacked and counted, up to `limit` bytes."""

    def __init__(self, response: HttpAnswer, received: Received, limit: int) -> None:
        self._content = response.content
        self._body = Body(response.headers.get("content-encoding", ""))
        self._unpacked: Iterator[bytes] = iter(())
        self._received = received
        self._limit = limit

    async def next(self) -> bytes:
        """Return the next part, an empty one at the end. Raises `ModelError`."""
        while (part := next(self._unpacked, b"")) == b"":
            if not (packed := await self._content.readany()):
                return b""
            self._unpacked = iter(self._body.feed(packed))
        received = self._received
        received.size += len(part)
        received.blank += len(part) if part.isspace() else 0
        if received.size > self._limit:
            msg = f"the answer is longer than the limit of {self._limit} B"
            raise ModelError(msg, code=ModelErrorCode.MALFORMED_ANSWER, received=0)
        return part

    async def rest(self) -> bytes:
        """Return what follows, to the end. Raises `ModelError`."""
        parts = []
        while part := await self.next():
            parts.append(part)
        return b"".join(parts)


class HttpModel(LLM):
    """Models of one service, which speaks the protocol of `format`.

    `connections` are shared and stay the caller's to close. `environment` (the process's own by
    default) has addresses and keys where the request's settings name none. `response_limit` is in
    bytes; `grace` are the seconds between events of a stream whose answer is finished.
    """

    def __init__(
        self,
        service: Service,
        format: Format,  # noqa: A002 - the field's word
        connections: Connections,
        *,
        environment: Mapping[str, str] | None = None,
        response_limit: int = RESPONSE_LIMIT,
        grace: float = GRACE_SECONDS,
        on_headers: OnHeaders | None = None,
    ) -> None:
        self._on_headers = on_headers
        self._service = service
        self._format = format
        self._connections = connections
        self._environment = os.environ if environment is None else environment
        self._response_limit = response_limit
        self._grace = grace
        self._endpoints: dict[tuple[str | None, ...], Endpoint] = {}
        self._signer = Signer()
        self._tokens = Tokens()

    def generate(self, request: ModelRequest) -> Coroutine[Any, Any, LLMResponse]:
        """Answer the request; streamed underneath if its settings say so, with an equal result.

        Raises `ModelError` or a subclass; `ModelTimeoutError` after `settings.timeout` seconds.
        """
        return self.generate_streaming(request, _ignore)

    async def generate_streaming(
        self, request: ModelRequest, on_text: Callable[[str], None]
    ) -> LLMResponse:
        """Answer like `generate` and pass each piece of text to `on_text` as it arrives.

        Pieces arrive only when `settings.stream` is set.
        """
        endpoint = self._endpoint(request.settings)
        seconds = request.settings.timeout
        deadline = asyncio.timeout(seconds)
        received = Received(self._format.usage)
        try:
            async with deadline:
                payload = await self._exchange(endpoint, request, on_text, received)
                answer = await _read(received.size, self._format.response, payload, request.model)
            if answer.content and not received.text:  # the service does not stream this one
                on_text(answer.content)
            answer = with_offered_names(answer, request.tools)
            answer = with_counts(answer, payload.get(self._format.usage_field))
            name = received.request_id or _printable(payload.get(_NAMED_IN_BODY))
            return answer.model_copy(update={"request_id": name}) if name else answer
        except _BROKEN as error:
            if deadline.expired():
                msg = f"no answer from {endpoint.host} within {seconds:g} s (settings.timeout)"
                # Where nothing came, the next attempt gives a better estimate of its usage.
                came = received.tokens or (None if received.usage is None else 0)
                failure: ModelError = ModelTimeoutError(msg, received=came)
            else:
                reason = redact(_reason(error), endpoint.key)
                failure = ModelError(
                    f"connection to {endpoint.host}: {reason}",
                    retryable=True,
                    code=ModelErrorCode.CONNECTION_ERROR,
                    received=None if isinstance(error, _NOT_SENT) else received.tokens,
                )
            failure.usage = received.usage
            if received.request_id:
                failure.name_request(received.request_id)
        except ModelError as error:
            if error.received is not None or received.text or received.usage:
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
        support = support_at(endpoint.service, request.model)
        messages = request.messages
        if endpoint.service.api is not Api.MESSAGES:
            messages = without_half_a_turn(messages)
        messages = with_sent_ids(fitted(messages, support), support.call_ids)
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
            payload = await self._answer(response, endpoint.key, on_text, received)
        finally:
            response.release()
        if failed := self._format.failure(payload):
            raise failed_event(failed, host=endpoint.host, key=endpoint.key)
        return payload

    async def _answer(
        self,
        response: HttpAnswer,
        key: str | None,
        on_text: Callable[[str], None],
        received: Received,
    ) -> dict[str, Any]:
        """Return the payload of an answer, whole or streamed: the body tells, not its label."""
        parts = _Parts(response, received, self._response_limit)
        begin = await _begin(parts)
        labelled = response.headers.get("content-type", "").lower()
        is_whole = begin.lstrip()[:1] in (b"{", b"[")
        if self._format.cutter.fits(begin) or (
            labelled.startswith(self._format.stream_type) and not is_whole
        ):
            return await self._assemble(begin, parts, on_text, received)
        if not is_whole:
            said = begin[:_MOST_BLANKS].decode(errors="replace").strip()
            raise malformed(f"the body is not JSON: {redact(said, key)[:_LONGEST_EXCERPT]!r}")
        payload = await _read(received.size, self._format.parse, begin + await parts.rest())
        received.report = payload.get(self._format.usage_field)
        received.is_whole = True
        return payload

    async def _assemble(
        self,
        begin: bytes,
        parts: "_Parts",
        on_text: Callable[[str], None],
        received: Received,
    ) -> dict[str, Any]:
        cutter, answer = self._format.cutter(), self._format.stream()
        received.is_stream = True
        heard = 0.0

        async def take(events: list[bytes]) -> None:
            nonlocal heard
            heard = asyncio.get_running_loop().time() if events else heard
            for data in events:
                if answer.is_over:
                    return
                if piece := await _read(len(data), answer.add, data):
                    on_text(piece)

        part = begin
        try:
            while part:
                for first in range(0, len(part), _AT_ONCE):
                    await take(cutter.feed(part[first : first + _AT_ONCE]))
                    if first + _AT_ONCE < len(part):
                        await asyncio.sleep(0)
                until = heard + self._grace if answer.finished else None
                part = b"" if answer.is_over else await _following(parts, until)
            if answer.is_over:
                await _read_out(parts)
            # Bytes without an end take nothing from an answer that is whole.
            with contextlib.suppress(*([ModelError] if answer.finished else [])):
                await take(cutter.end())
            if answer.error is not None:
                return answer.error
            payload = await _read(received.size, answer.payload)
            received.is_whole = True
            return payload
        finally:
            received.text = answer.size
            received.report = answer.usage

    async def _refused(self, response: HttpAnswer, endpoint: Endpoint) -> ModelError:
        body = b""
        with contextlib.suppress(*_BROKEN, ModelError):  # the status says more than a broken body
            parts = _Parts(response, Received(), self._response_limit)
            while len(body) < _ERROR_LIMIT and (part := await parts.next()):
                body += part
        return refusal(
            response.status,
            response.headers,
            body[:_ERROR_LIMIT],
            host=endpoint.host,
            key=endpoint.key,
            now=datetime.now(UTC),
            variable=endpoint.variable,
        )


def _reason(error: Exception) -> str:
    """Return why a connection failed, in a line."""
    if isinstance(error, UnreadableHeadError):
        said = str(error).partition("\n")[0].rstrip(":")
        return f"the head of its answer cannot be read: {said}"
    return f"{type(error).__name__}: {error}"


def _request_id(headers: Mapping[str, str]) -> str:
    """Return the provider's name of a request in the headers of its answer; "" for none."""
    for name in _REQUEST_IDS:
        if name in headers:
            return _printable(headers[name])
    return ""


def _printable(name: Any) -> str:
    """Return a request's name as it is kept and shown; "" where it is none."""
    is_name = isinstance(name, str) and name.isascii() and name.isprintable()
    return name[:_LONGEST_ID] if is_name else ""


async def _read(size: int, read: Callable[..., R], *args: Any) -> R:
    """Return `read(*args)` for an answer of `size` bytes; a large one blocks no event loop."""
    return await asyncio.to_thread(read, *args) if size >= LARGE_ANSWER else read(*args)


async def _begin(parts: _Parts) -> bytes:
    """Return the first bytes of a body, as many as tell what it is, without a byte order mark."""
    begin = b""
    while part := await parts.next():
        begin += part
        if len(begin) > _MOST_BLANKS or len(begin.removeprefix(_BOM).lstrip()) >= _LONGEST_FIELD:
            break
    return begin.removeprefix(_BOM)


async def _following(parts: _Parts, until: float | None) -> bytes:
    """Return the next bytes of a stream, none after its last.

    `until` is set where its answer is finished: what does not come by then is not missed.
    """
    try:
        async with asyncio.timeout_at(until):
            return await parts.next()
    except _BROKEN:  # a timeout is one
        if until is None:
            raise
        return b""


async def _read_out(parts: _Parts) -> None:
    # The answer is whole. Only a connection whose last bytes were read can be used again.
    with contextlib.suppress(*_BROKEN, ModelError):
        async with asyncio.timeout(_READ_OUT_SECONDS):
            while await parts.next():
                pass


def _ignore(_piece: str) -> None:
    """Drop a piece that nobody waits for."""
