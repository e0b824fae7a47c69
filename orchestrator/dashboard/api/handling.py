"""One request of the API: who may make it, what it may say, and how it is answered."""

import asyncio
import logging
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from http import HTTPStatus
from threading import Thread
from typing import Any, ClassVar, Generic, Self, TypeVar
from urllib.parse import urlparse

from flower.api import BaseApiHandler
from pydantic import BaseModel, ValidationError
from tornado import web

from stepfleet.orchestrator.batches.failures import Failures
from stepfleet.orchestrator.client.fleet import AsyncFleet
from stepfleet.orchestrator.dashboard.access import AccessRoles, host_of, is_rebindable, known_user
from stepfleet.orchestrator.dashboard.api.records import Problem
from stepfleet.orchestrator.errors import AgentException, ConfigurationError, StoreError
from stepfleet.orchestrator.records.calls.answers import AskCount
from stepfleet.orchestrator.records.text.redaction import redact_error
from stepfleet.orchestrator.settings.settings import Settings
from stepfleet.orchestrator.store.fleet.checks import Check

MOST = 4
"""Files that are received, submitted or sent at the same time."""

WORK_PATIENCE = 20.0
"""Seconds for which a call to a Redis that is away is repeated: nobody waits for the page."""

T = TypeVar("T")


class FileWork:
    """The places for work on files, of which there are few."""

    def __init__(self) -> None:
        self._taken = 0

    @contextmanager
    def place(self) -> Iterator[None]:
        """Take a place. Raises `StoreError` where none is free."""
        if self._taken >= MOST:
            msg = f"{MOST} files are being uploaded or downloaded here; try again in a moment"
            raise StoreError(msg)
        self._taken += 1
        try:
            yield
        finally:
            self._taken -= 1

    async def do(self, fleet: AsyncFleet, what: Callable[[AsyncFleet], Awaitable[T]]) -> T:
        """Return what `what` returns for a fleet as `fleet`, in a thread of its own.

        The thread ends with the process: what it leaves is as after a crash.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def deliver(put: Callable[[Any], None], value: Any) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(lambda: None if done.done() else put(value))

        async def work() -> T:
            known = fleet.settings
            patient = known.model_copy(update={"patience": max(known.patience, WORK_PATIENCE)})
            async with AsyncFleet(settings=patient) as own:
                return await what(own)

        def run() -> None:
            try:
                found = asyncio.run(work())
            except BaseException as error:  # noqa: BLE001 - the request reports it
                deliver(done.set_exception, error)
            else:
                deliver(done.set_result, found)

        within = copy_context().run  # whose action it is
        Thread(target=within, args=(run,), name="stepfleet-file", daemon=True).start()
        return await done


class Recent(Generic[T]):
    """Answers by their questions: each is as old as `seconds` at the most, and `most` are kept.

    Errors are not kept. One who gives up takes nothing away from others that wait.
    """

    def __init__(self, seconds: float, most: int = 1) -> None:
        self._seconds = seconds
        self._most = most
        self._found: dict[Hashable, tuple[float, asyncio.Task[T]]] = {}

    async def get(self, key: Hashable, read: Callable[[], Awaitable[T]]) -> T:
        """Return what `read` returns now, or returned lately. Raises what it raises."""
        at, task = self._found.get(key, (0.0, None))
        is_old = time.monotonic() - at > self._seconds
        if task is None or (task.done() and (is_old or task.cancelled() or task.exception())):
            self._found.pop(key, None)
            while len(self._found) >= self._most:
                del self._found[next(iter(self._found))]
            task = asyncio.ensure_future(_awaited(read))
            self._found[key] = (time.monotonic(), task)
        return await asyncio.shield(task)


async def _awaited(read: Callable[[], Awaitable[T]]) -> T:
    return await read()


log = logging.getLogger(__name__)

LONGEST_WAIT = 30.0
"""Seconds until a request that reads is given up."""
PATIENCE = 3.0
"""Seconds for which a call to a Redis that is away is repeated."""
AT_ONCE = 100
"""Requests that are worked on at a time; the next ones are refused."""
SERVERS_SECONDS, FAILURES_SECONDS, ASKS_SECONDS = 10.0, 5.0, 5.0
"""How old checks of servers, failures by cause, and a batch's calls for people may be."""
LONGEST_BODY = 65_536
LONGEST_USER = 100
_FIELD = re.compile(r"limit (?:'[^']*'|\"[^\"]*\"): field '(\w+)'")
_OF_BODIES = ("overrides", "where", "filter", "message", "at", "body")
FIX = "start Flower with --basic-auth USER:PASSWORD, or with OAuth"
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
}
"""Of every answer."""


@dataclass(frozen=True, slots=True)
class Site:
    """The fleet that is shown. `content`: texts of models and tools are shown to known users.

    `is_local`: only this machine can connect, so reads need no password. `roles`: who may do what.
    """

    fleet: AsyncFleet
    content: bool = True
    is_local: bool = False
    roles: AccessRoles = field(default_factory=AccessRoles)
    busy: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))
    work: FileWork = field(default_factory=FileWork)
    servers: Recent[tuple[Check, ...]] = field(default_factory=lambda: Recent(SERVERS_SECONDS))
    failures: Recent[Failures] = field(default_factory=lambda: Recent(FAILURES_SECONDS, 20))
    asks: Recent[AskCount] = field(default_factory=lambda: Recent(ASKS_SECONDS, 20))

    @classmethod
    def of(cls, settings: Settings, *, content: bool | None = None, is_local: bool = False) -> Self:
        """Return the site of a fleet; the settings say whether it has `content` where that is None.

        Its calls to Redis wait a few seconds only, as somebody waits for the page.
        """
        brief = settings.model_copy(update={"patience": min(settings.patience, PATIENCE)})
        shown = settings.flower_content if content is None else content
        users = (settings.flower_operators, settings.flower_approvers, settings.flower_viewers)
        return cls(AsyncFleet(settings=brief), shown, is_local, AccessRoles(*users))


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a query, and how its text is read."""

    about: str
    read: Callable[[str], Any] = str
    kind: str = "string"


def whole(what: str, least: int, most: int) -> Parameter:
    """Return a parameter that is a whole number from `least` to `most`."""

    def read(text: str) -> int:
        if not text.isascii() or len(text) > len(str(most)) or not least <= int(text) <= most:
            raise ValueError
        return int(text)

    return Parameter(f"{what}, from {least} to {most}", read, "integer")


def text(about: str, most: int) -> Parameter:
    """Return a parameter that is a text of at most `most` characters."""

    def read(given: str) -> str:
        if len(given) > most:
            raise ValueError
        return given

    return Parameter(f"{about}, up to {most} characters", read)


def words(allowed: Sequence[str]) -> Parameter:
    """Return a parameter that is one of these words."""

    def read(given: str) -> str:
        if given not in allowed:
            raise ValueError
        return given

    return Parameter(" or ".join(allowed), read)


def flag(about: str) -> Parameter:
    """Return a parameter that is 1, or 0 as without it."""

    def read(given: str) -> bool:
        if given not in {"0", "1"}:
            raise ValueError
        return given == "1"

    return Parameter(f"1: {about}", read, "integer")


class MissingError(ConfigurationError):
    """There is no such run or batch."""


@web.stream_request_body
class ApiHandler(BaseApiHandler):
    """What all resources share. Flower's authentication comes first, whatever it is.

    A body is taken after that only, and up to a size: Tornado alone would take 100 MB of anybody.
    """

    parameters: ClassVar[Mapping[str, Parameter]] = {}
    """Of GET, by name."""

    def initialize(self, site: Site) -> None:
        """Store the site."""
        self.site = site
        self.body = bytearray()

    def set_default_headers(self) -> None:
        """No other site reads answers, not even where Flower's own API is open to all."""
        for name, value in HEADERS.items():
            self.set_header(name, value)

    def prepare(self) -> None:
        """Refuse whom Flower does not know, and large bodies."""
        if not self.is_known:
            if is_rebindable(host_of(self.request.host)):
                raise web.HTTPError(403, f"by this name a password is needed: {FIX}")
            if not self.site.is_local:
                super().prepare()
        if not self.current_user:
            raise web.HTTPError(401, "log in first")
        size = self.request.headers.get("Content-Length", "")
        if self.keeps_body and size.isdecimal() and int(size[:20]) > LONGEST_BODY:
            raise web.HTTPError(413, f"body: write at most {LONGEST_BODY} bytes")
        if self.keeps_body:
            connection: Any = self.request.connection
            connection.set_max_body_size(LONGEST_BODY)  # also of one in chunks

    def data_received(self, chunk: bytes) -> None:
        """Keep a part of the body. Who takes it otherwise bounds it as well."""
        self.body += chunk

    def check_xsrf_cookie(self) -> None:
        """Do as Flower; without a password, refuse other sites too."""
        super().check_xsrf_cookie()
        site, origin = (self.request.headers.get(name) for name in ("Sec-Fetch-Site", "Origin"))
        # A proxy may have changed the Host, so the browser's own word comes first.
        foreign = origin and urlparse(origin).netloc.lower() != self.request.host.lower()
        if site not in {None, "same-origin", "none"} or (site is None and foreign):
            raise web.HTTPError(403, "requests of other sites are refused")

    @property
    def keeps_body(self) -> bool:
        """Whether the body is kept in memory."""
        return type(self).data_received is ApiHandler.data_received

    @property
    def is_known(self) -> bool:
        """Whether Flower knows its users."""
        options = self.application.options
        return bool(options.basic_auth or options.auth)

    @property
    def shows_content(self) -> bool:
        """Whether texts of models and tools are shown."""
        return self.site.content and self.is_known

    @property
    def user(self) -> str:
        """Who makes the request, as the audit names them."""
        return (known_user(self) or "unknown")[:LONGEST_USER]

    def query(self) -> dict[str, Any]:
        """Return the query's parameters. Raises `ConfigurationError` that names one."""
        found: dict[str, Any] = {}
        for name, values in self.request.query_arguments.items():
            known = self.parameters.get(name)
            if known is None:
                msg = f"{ascii(name)[:60]}: no such parameter; use {', '.join(self.parameters)}"
                raise ConfigurationError(msg)
            try:
                (text,) = (value.decode() for value in values)
                if text or name in ("tenant", "parent"):
                    found[name] = known.read(text)
            except ValueError:
                msg = f"{name}: {known.about}; write it once, as valid text"
                raise ConfigurationError(msg) from None
        return found

    def answer(self, record: BaseModel, status: int = 200) -> None:
        """Finish with a record."""
        self.set_status(status)
        self.set_header("Content-Type", "application/json; charset=UTF-8")
        self.finish(record.model_dump_json())

    def refuse(self, error: Exception, status: int) -> None:
        """Finish with a problem; `field` is the parameter that its text begins with."""
        text = redact_error(str(getattr(error, "message", error)))
        first = text.removeprefix("field '").split(" ", 1)[0].rstrip("':")
        named = first if first in {*self.parameters, *_OF_BODIES} else None
        if inner := _FIELD.match(text):
            named = inner[1]
        self.answer(Problem(error=text, field=named), status)

    def break_off(self) -> None:
        """Close the connection: a file that lacks its end must not look whole."""
        connection: Any = self.request.connection
        if connection.stream is not None:
            connection.stream.close()

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        """Answer in JSON, without a traceback."""
        error = kwargs.get("exc_info", (None, None))[1]
        if status_code == HTTPStatus.UNAUTHORIZED and self.application.options.basic_auth:
            self.set_header("WWW-Authenticate", 'Basic realm="flower"')
        text = error.get_message() if isinstance(error, web.HTTPError) else None
        self.answer(Problem(error=text or self._reason), status_code)

    async def attempt(self, what: Callable[[], Any], missing: int = 400) -> None:
        """Answer with the record that `what` returns, or with why there is none.

        `missing` is the status for what the fleet refuses.
        """
        if self.site.busy.locked():
            self.set_header("Retry-After", "1")
            return self.refuse(StoreError("too many requests at once: try again"), 503)
        try:
            async with self.site.busy:
                self.answer(await what())
        except MissingError as error:
            self.refuse(error, HTTPStatus.NOT_FOUND)
        except ConfigurationError as error:
            self.refuse(error, missing)
        except (StoreError, TimeoutError) as error:
            text = str(error) or f"Redis has not answered within {LONGEST_WAIT:g} s; try again"
            self.refuse(StoreError(text), 503)
        except AgentException as error:
            self.refuse(error, 500)
        return None


class ReadHandler(ApiHandler, ABC):
    """A resource that is read."""

    async def get(self, *path: str) -> None:
        """Answer with the resource."""
        try:
            query = self.query()
        except ConfigurationError as error:
            return self.refuse(error, 400)

        async def found() -> BaseModel:
            async with asyncio.timeout(LONGEST_WAIT):
                return await self.found(*path, **query)

        return await self.attempt(found, 404 if path else 400)

    @abstractmethod
    async def found(self, *path: str, **query: Any) -> BaseModel:
        """Return the resource."""


def body_of(request: bytes, kind: str, form: type[BaseModel]) -> Any:
    """Return the body of a request in its form. Raises `ConfigurationError`."""
    if not request:
        return form()
    if kind.partition(";")[0].strip() != "application/json":
        raise ConfigurationError("body: send it as Content-Type: application/json")
    try:
        return form.model_validate_json(request)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        place = ".".join(str(part)[:60] for part in first["loc"]) or "JSON"
        raise ConfigurationError(f"body: {place}: {first['msg'][:200]}") from None
