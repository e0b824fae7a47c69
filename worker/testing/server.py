"""The scripted model server inside a test: its own thread, real HTTP, started by `with`.

Composes the parts; decides nothing.
"""

import asyncio
import logging
import os
import secrets
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from types import TracebackType
from typing import Any, Self

from aiohttp import web

from stepfleet.orchestrator.records import exact_json
from stepfleet.worker.engine.loop_thread import LoopThread
from stepfleet.worker.testing.anthropic import PATH as MESSAGES
from stepfleet.worker.testing.anthropic import WIRE as MESSAGES_WIRE
from stepfleet.worker.testing.bedrock import PATH as CONVERSE
from stepfleet.worker.testing.bedrock import WIRE as CONVERSE_WIRE
from stepfleet.worker.testing.google import PATH as CONTENT
from stepfleet.worker.testing.google import WIRE as CONTENT_WIRE
from stepfleet.worker.testing.openai.answers import COMPLETIONS, models_at
from stepfleet.worker.testing.openai.conversation import first_user_text, turn_of
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.rate_limits import RateLimit, RateLimiter
from stepfleet.worker.testing.responses import PATH as RESPONSES
from stepfleet.worker.testing.responses import WIRE as RESPONSES_WIRE
from stepfleet.worker.testing.rules import Rules, Said, as_rules
from stepfleet.worker.testing.scenario import (
    Ending,
    Fault,
    Faults,
    HttpAnswer,
    Latency,
    Planned,
    name_of,
)
from stepfleet.worker.testing.service import RequestLog, SimulatedService, without_secrets
from stepfleet.worker.testing.wire import CHAT, MisfitError, Wire

_KEYS = ("authorization", "x-api-key", "x-goog-api-key", "api-key")
_LONGEST_BODY = 32 * 1024 * 1024
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


async def send(request: web.BaseRequest, answer: HttpAnswer) -> web.StreamResponse:
    """Send the answer and end the connection in its way.

    Raises `ConnectionError` where the client has gone.
    """
    if answer.ending is Ending.SILENCE:
        await asyncio.Event().wait()  # until the client goes, which cancels this
    if answer.ending is Ending.COMPLETE and answer.length is not None:
        return await _send_whole(request, answer)
    response = web.StreamResponse(status=answer.status, headers=_headers(answer))
    if answer.pieces:
        await _send_pieces(request, response, answer)
    if answer.ending is Ending.RESET:
        await _reset(request)
    elif answer.ending is Ending.CLOSE:
        response.force_close()
    if answer.ending is not Ending.RESET:
        await response.write_eof()
    return response


async def _send_whole(request: web.BaseRequest, answer: HttpAnswer) -> web.StreamResponse:
    response = web.Response(
        status=answer.status, body=b"".join(answer.pieces), headers=_headers(answer)
    )
    await response.prepare(request)
    await response.write_eof()
    return response


async def _send_pieces(
    request: web.BaseRequest, response: web.StreamResponse, answer: HttpAnswer
) -> None:
    response.content_length = answer.length
    await response.prepare(request)
    if not answer.pause:
        await response.write(b"".join(answer.pieces))
        return
    for i, piece in enumerate(answer.pieces):
        if i:
            await asyncio.sleep(answer.pause)
        await response.write(piece)


def _headers(answer: HttpAnswer) -> dict[str, str]:
    return {"Content-Type": answer.content_type, **answer.headers}


async def _reset(request: web.BaseRequest) -> None:
    """Close the connection so that the client sees a reset, after what was already written."""
    transport = request.transport
    if transport is None or transport.is_closing():
        return
    while transport.get_write_buffer_size():  # noqa: ASYNC110 - transports report no such event
        await asyncio.sleep(0)
    # uvloop's own socket object sets no options: a second descriptor of the same socket does.
    known = transport.get_extra_info("socket")
    with socket.socket(fileno=os.dup(known.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    transport.abort()


@dataclass
class HttpFrontend:
    """Answers HTTP requests of one server, as its service decides."""

    service: SimulatedService
    latency: Latency
    log: RequestLog
    key: Callable[[dict[str, Any]], str]

    async def serve(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one HTTP request."""
        path = request.path.rstrip("/")
        if request.method == "POST" and (wire := self._wire(path)):
            return await self._complete(request, wire)
        if request.method == "GET" and (models := models_at(path)):
            return _json(models)
        if path == "/stats" and request.method == "GET":
            return _json(self._stats())
        if path == "/limits" and request.method in {"GET", "PUT"}:
            return await self._limits(request)
        return _json(
            {"error": {"message": f"there is no {request.method} {path}", "type": "not_found"}},
            HTTPStatus.NOT_FOUND,
        )

    @staticmethod
    def _wire(path: str) -> Wire | None:
        if CONTENT.fullmatch(path):
            return CONTENT_WIRE
        if COMPLETIONS.fullmatch(path):
            return CHAT
        if CONVERSE.fullmatch(path):
            return CONVERSE_WIRE
        return {RESPONSES: RESPONSES_WIRE, MESSAGES: MESSAGES_WIRE}.get(path)

    async def _complete(self, request: web.BaseRequest, wire: Wire) -> web.StreamResponse:
        try:
            sent = _parsed(await _read(request))
            body = wire.conversation(sent, request.path)
        except MisfitError as error:
            self.log.refuse(error.violation)
            return await send(request, wire.refusing(error.violation))
        headers = without_secrets(request.headers)
        record = self.log.begin(
            self.key(body), turn_of(body), body, headers, sent, _account(request.headers)
        )
        decision = self.service.decide(record, wire, record.received)
        if decision.violation is not None:
            self.log.refuse(decision.violation)
        try:
            await self._wait(record, decision.answer)
            self.log.decided(record, decision)
            named = {wire.id_header: f"req-{record.number}"} if wire.id_header else {}
            named |= decision.answer.headers
            return await send(request, replace(decision.answer, delay=0, headers=named))
        except (asyncio.CancelledError, ConnectionError):
            self.log.disconnected(record)
            raise
        finally:
            self.log.end(record)
            if decision.is_admitted:
                self.service.limiter.release(record.model, record.account)

    async def _wait(self, record: RequestRecord, answer: HttpAnswer) -> None:
        seconds = answer.delay
        if seconds is None:
            seed = self.service.faults.seed
            seconds = self.latency.seconds(seed, record.key, record.turn, record.attempt)
        if seconds:
            await asyncio.sleep(seconds)

    async def _limits(self, request: web.BaseRequest) -> web.Response:
        """Show the limits by model ("" for all), or set the one in the body; {} lifts it."""
        limiter = self.service.limiter
        if request.method == "PUT":
            try:
                given = _parsed(await _read(request))
                model = str(given.pop("model", ""))
                limiter.change(RateLimit(**given) if given else None, model)
            except (MisfitError, TypeError, ValueError) as error:
                fields = ", ".join(("model", *RateLimit.__dataclass_fields__))
                text = f"no limit was set ({error}); the fields are {fields}"
                return _json({"error": {"message": text}}, HTTPStatus.BAD_REQUEST)
        return _json({name: vars(one) for name, one in limiter.limits.items()})

    def _stats(self) -> dict[str, Any]:
        log = self.log
        return {
            "requests": log.total,
            "in_flight": log.in_flight,
            "most_in_flight": log.most_in_flight,
            "turns": len(log.counts),
            "outcomes": log.outcomes,
            "violations": log.violations,
        }


def _account(headers: Mapping[str, str]) -> str:
    """Return a digest of the key that a request carries."""
    key = next((headers[name] for name in _KEYS if name in headers), "")
    # A signature differs for each request; the key's name before it does not.
    return name_of(key.partition("/")[0] if key.startswith("AWS4-") else key)[:12]


async def _read(request: web.BaseRequest) -> bytes:
    """Return the body, whose limit is that of a service and not that of `request.read()`."""
    raw = bytearray()
    async for part in request.content.iter_any():
        raw += part
        if len(raw) > _LONGEST_BODY:
            raise MisfitError("body", f"is longer than {_LONGEST_BODY} B")
    return bytes(raw)


def _parsed(raw: bytes) -> dict[str, Any]:
    try:
        body = exact_json.loads(raw)
        exact_json.dumps([[[[[[[[body]]]]]]]])  # takes less nesting than it reads
    except ValueError:
        body = None
    except TypeError:
        raise MisfitError("body", "is nested too deeply") from None
    if not isinstance(body, dict):
        raise MisfitError("body", "is not a JSON object")
    return body


def _json(payload: Any, status: HTTPStatus = HTTPStatus.OK) -> web.Response:
    return web.Response(
        body=exact_json.dumps(payload), status=status, content_type="application/json"
    )


# Below the ephemeral ports: there a client that retries a dead port can connect to itself.
_LOWEST, _COUNT = 20_000, 12_000
_TRIES = 200
_BACKLOG = 4096
_KEEP_ALIVE = 3600.0
_SHUTDOWN_SECONDS = 0.2

Serve = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

_silent = logging.getLogger("stepfleet.worker.testing.server")


@dataclass(frozen=True, slots=True)
class Listener:
    """An open port that answers HTTP until it is closed."""

    server: web.Server
    sockets: asyncio.Server
    port: int

    async def close(self) -> None:
        """Stop listening and end every connection, open requests included."""
        self.sockets.close()
        await self.server.shutdown(_SHUTDOWN_SECONDS)


async def listen(serve: Serve, host: str, port: int | None) -> Listener:
    """Serve on `port`, or on a free one from 20000 to 31999 where it is None.

    Raises `OSError` that names the port where it is taken.
    """
    loop = asyncio.get_running_loop()
    server = web.Server(
        serve,
        handler_cancellation=True,
        access_log=None,
        keepalive_timeout=_KEEP_ALIVE,
        logger=_silent,
    )
    wanted = [port] if port is not None else _free_ports()
    refused: OSError | None = None
    for number in wanted:
        try:
            sockets = await loop.create_server(server, host, number, backlog=_BACKLOG)
        except OSError as error:
            refused = error
            continue
        return Listener(server, sockets, number)
    named = port if port is not None else f"any of {_TRIES} from {_LOWEST}"
    raise OSError(f"the model server cannot listen on {host} port {named}: {refused}")


def _free_ports() -> list[int]:
    return [_LOWEST + secrets.randbelow(_COUNT) for _ in range(_TRIES)]


_STARTING_SECONDS = 10.0
_CLOSING_SECONDS = 5.0


class ModelServer:
    """An OpenAI-compatible service whose model follows rules or scripts.

    `rules` is a callable from `RequestRecord` to a reply, or a mapping from conversation key to
    the replies of its turns. `latency` is in seconds. The key of a conversation is the text of
    its first user message unless `key` makes another of the request's body. Without `port` a
    free one below 32768 is taken. `limits` are enforced for each model and key: one for all models,
    or by the model's name. Prompts of more than `context_window` tokens are refused. Raises
    `OSError` on entering where the port is taken.
    """

    def __init__(  # noqa: PLR0913 - one argument per way in which servers differ
        self,
        rules: Rules | Mapping[str, Sequence[Said]] | None = None,
        *,
        faults: Faults | None = None,
        latency: Latency | float = 0.0,
        limits: RateLimit | Mapping[str, RateLimit] | None = None,
        context_window: int | None = None,
        log: RequestLog | None = None,
        key: Callable[[dict[str, Any]], str] = first_user_text,
        host: str = "127.0.0.1",
        port: int | None = None,
    ) -> None:
        self.log = log or RequestLog()
        self.host = host
        self._port = port
        self._scripts = as_rules(rules)
        by_model = {"": limits} if isinstance(limits, RateLimit) else limits
        self._service = SimulatedService(
            self._scripts, faults or Faults(), RateLimiter(by_model), context_window
        )
        self._endpoint = HttpFrontend(
            self._service,
            latency if isinstance(latency, Latency) else Latency(latency),
            self.log,
            key=key,
        )
        self._listener: Listener | None = None
        self._thread: LoopThread | None = None

    @property
    def url(self) -> str:
        """The base URL for clients (`OPENAI_BASE_URL`). Needs a started server."""
        if self._listener is None:
            raise RuntimeError("the model server is not started; use it in a `with` block")
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self._listener.port}/v1"

    @property
    def requests(self) -> tuple[RequestRecord, ...]:
        """The requests that the log keeps, in order of arrival."""
        return self.log.requests

    @property
    def violations(self) -> tuple[str, ...]:
        """The errors of refused requests, failures of the rules included."""
        return self.log.violations

    def count(self, key: str, turn: int) -> int:
        """Return how often that turn (from 1) of that conversation was requested."""
        return self.log.counts.get((key, turn), 0)

    def script(self, key: str, *replies: Said) -> None:
        """Let the conversation `key` get these replies, one per turn."""
        self._scripts = self._scripts.with_script(key, replies)
        self._service.rules = self._scripts

    def follow(self, rules: Rules | Mapping[str, Sequence[Said]]) -> None:
        """Follow these rules or scripts from now on, instead of all earlier ones."""
        self._scripts = as_rules(rules)
        self._service.rules = self._scripts

    def fail(
        self,
        fault: Fault | str,
        *,
        key: str | None = None,
        turn: int | None = None,
        attempt: int | None = 1,
    ) -> None:
        """Plan a fault; None means any conversation, turn or attempt."""
        fault = fault if isinstance(fault, Fault) else Fault(fault)
        faults = self._service.faults
        planned = (*faults.planned, Planned(fault, key, turn, attempt))
        self._service.faults = replace(faults, planned=planned)

    def limit(self, limit: RateLimit | None, model: str = "") -> None:
        """Enforce the limit from now on: on a model, or on all without one; None lifts it."""
        self._service.limiter.change(limit, model)

    async def start(self) -> None:
        """Serve on the running loop, instead of in a thread."""
        self._listener = await listen(self._endpoint.serve, self.host, self._port)

    async def stop(self) -> None:
        """End what `start` began; open requests end unanswered."""
        if self._listener is not None:
            await self._listener.close()
        self.log.close()

    def __enter__(self) -> Self:
        """Serve in a thread of its own."""
        thread = LoopThread("model-server")
        thread.start()
        try:
            started = asyncio.run_coroutine_threadsafe(self.start(), thread.loop)
            started.result(_STARTING_SECONDS)
        except BaseException:
            thread.stop(self.stop(), _CLOSING_SECONDS)
            raise
        self._thread = thread
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the server and its thread."""
        if self._thread is not None:
            self._thread.stop(self.stop(), _CLOSING_SECONDS)
            self._thread = None
