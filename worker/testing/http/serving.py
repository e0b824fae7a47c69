"""The HTTP side of the model server: paths, bodies, waiting, sending. Decides no answer."""

import asyncio
import os
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any

from aiohttp import web

from stepfleet.orchestrator.records import exact_json
from stepfleet.worker.testing.anthropic.answers import PATH as MESSAGES
from stepfleet.worker.testing.anthropic.answers import WIRE as MESSAGES_WIRE
from stepfleet.worker.testing.bedrock.answers import WIRE as CONVERSE_WIRE
from stepfleet.worker.testing.bedrock.conversation import PATH as CONVERSE
from stepfleet.worker.testing.google.answers import WIRE as CONTENT_WIRE
from stepfleet.worker.testing.google.conversation import PATH as CONTENT
from stepfleet.worker.testing.http.request_log import RequestLog, without_secrets
from stepfleet.worker.testing.http.service import Service
from stepfleet.worker.testing.openai.answers import COMPLETIONS, models_at
from stepfleet.worker.testing.openai.conversation import turn_of
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.responses.answers import WIRE as RESPONSES_WIRE
from stepfleet.worker.testing.responses.conversation import PATH as RESPONSES
from stepfleet.worker.testing.scenario.latency import Latency, name_of
from stepfleet.worker.testing.scenario.limits import RateLimit
from stepfleet.worker.testing.scenario.replies import Answer, Ending
from stepfleet.worker.testing.wire import CHAT, MisfitError, Wire

_KEYS = ("authorization", "x-api-key", "x-goog-api-key", "api-key")
_LONGEST_BODY = 32 * 1024 * 1024
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


async def send(request: web.BaseRequest, answer: Answer) -> web.StreamResponse:
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


async def _send_whole(request: web.BaseRequest, answer: Answer) -> web.StreamResponse:
    response = web.Response(
        status=answer.status, body=b"".join(answer.pieces), headers=_headers(answer)
    )
    await response.prepare(request)
    await response.write_eof()
    return response


async def _send_pieces(
    request: web.BaseRequest, response: web.StreamResponse, answer: Answer
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


def _headers(answer: Answer) -> dict[str, str]:
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
class Endpoint:
    """Answers HTTP requests of one server, as its service decides."""

    service: Service
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

    async def _wait(self, record: RequestRecord, answer: Answer) -> None:
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
