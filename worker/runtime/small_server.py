"""A small HTTP server for probes and scrapers: GET only, few at once, and answers for a second.

Runs in the process's event loop, so that whoever gets an answer knows that the loop turns.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import parse_qsl, urlsplit

import orjson

from stepfleet.orchestrator.errors import AgentException, ConfigurationError

log = logging.getLogger(__name__)

MOST_AT_ONCE = 8
"""Requests for `pages` that are answered at once; one more gets 503."""
MOST_OPEN = 64
"""Connections that have sent no request so far; one more takes the place of the oldest."""
MOST_KNOWN = 32
"""Answers that are kept for a second."""
HEAD_BYTES = 8192
READ_SECONDS = 5.0
ANSWER_SECONDS = 5.0
KEPT_SECONDS = 1.0
JSON = "application/json"


@dataclass(frozen=True, slots=True)
class HttpPage:
    """What is answered."""

    body: bytes
    status: HTTPStatus = HTTPStatus.OK
    kind: str = JSON


Make = Callable[[Mapping[str, str]], Awaitable[HttpPage]]
"""Makes a page of the parameters of a query; may raise `AgentException`."""


def json_page(data: object, status: HTTPStatus = HTTPStatus.OK) -> HttpPage:
    """Return a page of JSON."""
    return HttpPage(orjson.dumps(data), status)


def _problem(status: HTTPStatus, error: str) -> HttpPage:
    return json_page({"error": error}, status)


class SmallServer:
    """Answers GET requests by path, one for each connection.

    `pages` are answered anew after a second only, `live` ones at each request.
    """

    def __init__(self, pages: Mapping[str, Make], live: Mapping[str, Make]) -> None:
        self._pages = pages
        self._live = live
        self._answering = 0
        self._silent: dict[asyncio.StreamWriter, None] = {}
        self._known: dict[tuple[str, str], tuple[float, asyncio.Future[HttpPage]]] = {}

    @asynccontextmanager
    async def serve(self, host: str, port: int) -> AsyncGenerator[str]:
        """Serve while the block runs; give the address. Raises `ConfigurationError`."""
        try:
            server = await asyncio.start_server(self._connected, host, port, limit=HEAD_BYTES)
        except OSError as error:
            msg = (
                f"cannot serve at {host}:{port}: {error.strerror}; choose another --port or --host"
            )
            raise ConfigurationError(msg) from None
        own = server.sockets[0].getsockname()
        try:
            yield f"http://{f'[{own[0]}]' if ':' in own[0] else own[0]}:{own[1]}"
        finally:
            server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._silent[writer] = None
        if len(self._silent) > MOST_OPEN:
            oldest = next(iter(self._silent))
            del self._silent[oldest]
            oldest.transport.abort()
        try:
            page = await self._page_of(reader, writer)
            writer.write(_head(page) + page.body)
            async with asyncio.timeout(READ_SECONDS):
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, asyncio.IncompleteReadError):  # it has left; also a TimeoutError
            writer.transport.abort()
        finally:
            self._silent.pop(writer, None)

    async def _page_of(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> HttpPage:
        try:
            async with asyncio.timeout(READ_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return _problem(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "the request is too long")
        self._silent.pop(writer, None)
        return await self._answer(*head.split(b"\r\n", 1)[0].decode("latin-1").split(" "))

    async def _answer(self, method: str, address: str = "", *_: str) -> HttpPage:
        if method != "GET":
            return _problem(HTTPStatus.METHOD_NOT_ALLOWED, "only GET is answered")
        try:
            asked = urlsplit(address)
            query = dict(parse_qsl(asked.query, keep_blank_values=True, max_num_fields=10))
        except ValueError:
            return _problem(HTTPStatus.BAD_REQUEST, "the address cannot be read")
        if make := self._live.get(asked.path):
            return await _made(make, query)
        if make := self._pages.get(asked.path):
            if self._answering >= MOST_AT_ONCE:
                return _problem(HTTPStatus.SERVICE_UNAVAILABLE, "too many requests at once")
            self._answering += 1
            try:
                return await self._kept((asked.path, asked.query), make, query)
            finally:
                self._answering -= 1
        known = ", ".join((*self._live, *self._pages))
        return _problem(HTTPStatus.NOT_FOUND, f"there are: {known}")

    async def _kept(self, name: tuple[str, str], make: Make, query: Mapping[str, str]) -> HttpPage:
        """Return an answer of the last second, or that which is being made, or a new one."""
        now = time.monotonic()
        at, page = self._known.get(name, (0.0, None))
        if page is None or (page.done() and now - at > KEPT_SECONDS):
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            page = asyncio.ensure_future(_made(make, query))
            self._known[name] = (now, page)
        return await asyncio.shield(page)


async def _made(make: Make, query: Mapping[str, str]) -> HttpPage:
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            return await make(query)
    except ConfigurationError as error:
        return _problem(HTTPStatus.BAD_REQUEST, str(error))
    except (AgentException, OSError) as error:  # also a timeout
        why = str(error) or f"no answer within {ANSWER_SECONDS:g} s"
        return _problem(HTTPStatus.SERVICE_UNAVAILABLE, why)
    except Exception:
        log.exception("a request cannot be answered")
        return _problem(HTTPStatus.INTERNAL_SERVER_ERROR, "the log says why")


def _head(page: HttpPage) -> bytes:
    lines = (
        f"HTTP/1.1 {page.status.value} {page.status.phrase}",
        f"Content-Type: {page.kind}",
        f"Content-Length: {len(page.body)}",
        "Cache-Control: no-store",
        "Connection: close",
        *(["Allow: GET"] if page.status is HTTPStatus.METHOD_NOT_ALLOWED else []),
    )
    return "\r\n".join((*lines, "\r\n")).encode("latin-1")
