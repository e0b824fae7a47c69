"""One request of the API: who may make it, what it may say, and how it is answered."""

import asyncio
import logging
from base64 import b64decode
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, ClassVar
from urllib.parse import urlparse

from flower.api import BaseApiHandler
from pydantic import BaseModel, ValidationError
from tornado import web

from stepfleet.orchestrator.client.fleet import AsyncFleet
from stepfleet.orchestrator.dashboard.api.records import Problem
from stepfleet.orchestrator.errors import AgentException, ConfigurationError, StoreError

log = logging.getLogger(__name__)

LONGEST_WAIT = 60.0
"""Seconds until a request that reads is given up."""
LONGEST_BODY = 65_536
LONGEST_USER = 100
_OF_BODIES = ("overrides", "where", "filter", "message", "at", "body")


@dataclass(frozen=True, slots=True)
class Site:
    """The fleet that is shown. `content`: texts of models and tools are shown to known users."""

    fleet: AsyncFleet
    content: bool = True


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


class MissingError(ConfigurationError):
    """There is no such run or batch."""


class ApiHandler(BaseApiHandler):
    """What all resources share. Flower's authentication comes first, whatever it is."""

    parameters: ClassVar[Mapping[str, Parameter]] = {}
    """Of GET, by name."""

    def initialize(self, site: Site) -> None:
        """Store the site."""
        self.site = site

    def set_default_headers(self) -> None:
        """No other site reads answers, not even where Flower's own API is open to all."""
        self.set_header("X-Content-Type-Options", "nosniff")
        self.set_header("Cache-Control", "no-store")

    def prepare(self) -> None:
        """Refuse whom Flower does not know."""
        super().prepare()
        if not self.current_user:
            raise web.HTTPError(401, "log in first")

    def check_xsrf_cookie(self) -> None:
        """Do as Flower; without a password, refuse other sites too."""
        super().check_xsrf_cookie()
        site, origin = (self.request.headers.get(name) for name in ("Sec-Fetch-Site", "Origin"))
        if site not in {None, "same-origin", "none"} or (
            origin and urlparse(origin).netloc != self.request.host
        ):
            raise web.HTTPError(403, "requests of other sites are refused")

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
        if isinstance(self.current_user, str):
            return self.current_user[:LONGEST_USER]
        with suppress(ValueError):
            encoded = self.request.headers.get("Authorization", "").partition(" ")[2]
            if name := b64decode(encoded).decode().partition(":")[0]:
                return name[:LONGEST_USER]
        return "unknown"

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
                if text or name == "tenant":
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
        text = str(getattr(error, "message", error))
        first = text.split(" ", 1)[0].rstrip(":")
        field = first if first in {*self.parameters, *_OF_BODIES} else None
        self.answer(Problem(error=text, field=field), status)

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        """Answer in JSON, without a traceback."""
        error = kwargs.get("exc_info", (None, None))[1]
        if status_code == HTTPStatus.UNAUTHORIZED:
            self.set_header("WWW-Authenticate", 'Basic realm="flower"')
        text = error.log_message if isinstance(error, web.HTTPError) else None
        self.answer(Problem(error=text or self._reason), status_code)

    async def attempt(self, what: Callable[[], Any], missing: int = 400) -> None:
        """Answer with the record that `what` returns, or with why there is none.

        `missing` is the status for what the fleet refuses.
        """
        try:
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


class ReadHandler(ApiHandler):
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

    async def found(self, *path: str, **query: Any) -> BaseModel:
        """Return the resource."""
        raise NotImplementedError


def body_of(request: bytes, kind: str, form: type[BaseModel]) -> Any:
    """Return the body of a request in its form. Raises `ConfigurationError`."""
    if not request:
        return form()
    if kind.partition(";")[0].strip() != "application/json":
        raise ConfigurationError("body: send it as Content-Type: application/json")
    if len(request) > LONGEST_BODY:
        raise ConfigurationError(f"body: write at most {LONGEST_BODY} bytes")
    try:
        return form.model_validate_json(request)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        place = ".".join(str(part)[:60] for part in first["loc"]) or "JSON"
        raise ConfigurationError(f"body: {place}: {first['msg'][:200]}") from None
