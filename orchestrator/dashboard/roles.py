"""Roles at the door of every address of Flower: its own, and ours. What changes needs a role.

Whatever is not a GET needs an operator, unless its handler `needs` less: so does an address that a
later Flower adds. What Flower's own API changes is in the audit, as what ours does.
"""

import asyncio
import logging
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any, ClassVar

from flower.api import BaseApiHandler
from flower.views import BaseHandler
from flower.views.auth import LoginHandler, LogoutHandler
from flower.views.error import NotFoundErrorHandler
from flower.views.monitor import Healthcheck, Metrics
from redis.exceptions import RedisError
from tornado import web
from tornado.routing import URLSpec

from stepfleet.orchestrator.client.audit import LONGEST_NOTE, actor
from stepfleet.orchestrator.client.fleet import store_of
from stepfleet.orchestrator.dashboard.access import AccessRole, credentials_of, known_user
from stepfleet.orchestrator.dashboard.api.handling import LONGEST_USER, ApiHandler, Site
from stepfleet.orchestrator.dashboard.api.records import Problem
from stepfleet.orchestrator.errors import AgentException

log = logging.getLogger(__name__)

OPEN = (LoginHandler, LogoutHandler, NotFoundErrorHandler, Healthcheck, Metrics)
"""What Flower shows to everybody. Static files are no handlers of Flower."""
READS = {"GET", "HEAD"}
MOST_NOTES = 100
"""Entries that are written at a time; of further requests there is a line in the log alone."""
_NO_USERS = "roles are set, and Flower has no users: start it with --basic-auth, or with OAuth"
_NO_ROLE = "your account has no role here: ask an operator to add it to flower_viewers"


def role_of(handler: Any) -> str:
    """Return the role of who makes a request."""
    return str(getattr(handler, "role", AccessRole.OPERATOR))


def guarded(routes: Iterable[Any], site: Site) -> list[Any]:
    """Return addresses whose handlers ask for a role first, where any is set."""
    made: list[Any] = []
    for route in routes:
        if isinstance(route, URLSpec):
            own = _guard(route.handler_class, site, route.regex.pattern)
            made.append(URLSpec(route.regex.pattern, own, route.kwargs, route.name))
        else:
            pattern, handler, *rest = route
            made.append((pattern, _guard(handler, site, pattern), *rest))
    return made


class Guarded(BaseHandler):
    """A handler that asks for a role before anything else; whom Flower does not know, it refuses.

    In front of another handler's class, with the site that it `guards`.
    """

    guards: ClassVar[Site]
    noted_as: ClassVar[tuple[str, ...]] = ()
    """What an address of Flower's own API acts on, and the words of its action."""
    needs: ClassVar[AccessRole] = AccessRole.OPERATOR
    """The role that changes something here."""
    role: AccessRole | None = None
    is_let_in = False

    def prepare(self) -> Any:
        """Refuse who lacks the role."""
        problem = self._why_not_by_role()
        if problem is None:
            waits = super().prepare()
            self.is_let_in = bool(self.noted_as and self.current_user)
            return waits
        if not isinstance(self, BaseApiHandler):
            raise web.HTTPError(403, "%s", problem)
        self.set_status(403)
        self.set_header("Content-Type", "application/json; charset=UTF-8")
        return self.finish(Problem(error=problem).model_dump_json())

    def get_current_user(self) -> Any:
        """Do as Flower, which compares ASCII alone: an error 500 of any other header."""
        try:
            return super().get_current_user()
        except TypeError:
            if credentials_of(self) is None or self.application.options.auth:
                raise web.HTTPError(401) from None
            return True

    def on_finish(self) -> None:
        """Note what Flower itself has changed, or has tried to."""
        super().on_finish()
        status = self.get_status()
        is_change = self.request.method not in {*READS, "OPTIONS"}
        if self.is_let_in and is_change and status != HTTPStatus.METHOD_NOT_ALLOWED:
            noun, *words = self.noted_as
            user = (known_user(self) or "unknown")[:LONGEST_USER]
            about = (" ".join(words), " ".join((noun, *map(str, self.path_args))))
            _begin_note(self.guards, user, *about, f"answered {status}")

    def render(self, *args: Any, **values: Any) -> Any:
        """Show Flower's own pages without their buttons to who may not use them."""
        if "read_only" in values:
            values["read_only"] |= self.role is not AccessRole.OPERATOR
        return super().render(*args, **values)

    def _why_not_by_role(self) -> str | None:
        method = self.request.method
        roles = self.guards.roles
        if method == "OPTIONS" or not roles.are_set:  # the first says nothing of the fleet
            return None
        if not self.current_user:
            if method not in READS:
                raise web.HTTPError(401, "log in first")
            return None
        if (user := known_user(self)) is None:
            return _NO_USERS
        self.role = roles.of(user)
        if self.role is None:
            return _NO_ROLE
        needed = AccessRole.VIEWER if method in READS else self.needs
        return (
            None if self.role >= needed else f"this needs the role {needed}; yours is {self.role}"
        )


def _guard(handler: Any, site: Site, pattern: str) -> Any:
    if handler in OPEN or not issubclass(handler, BaseHandler):
        return handler
    about = {"guards": site, "needs": getattr(handler, "needs", Guarded.needs)}
    if not site.roles.are_set:
        about["role"] = AccessRole.OPERATOR
    if issubclass(handler, BaseApiHandler) and not issubclass(handler, ApiHandler):
        path = pattern.removeprefix("/api/").partition("/(")[0]
        about["noted_as"] = tuple(path.rstrip("$").split("/"))
    return type(handler.__name__, (Guarded, handler), {**about, "__doc__": handler.__doc__})


_notes: set[asyncio.Task[None]] = set()


def _begin_note(site: Site, user: str, action: str, target: str, detail: str) -> None:
    """Begin an entry: the request has its answer, and does not wait."""
    log.info("%s: %s of %s: %s", user, action, ascii(target)[:200], detail)
    if len(_notes) < MOST_NOTES:
        _notes.add(task := asyncio.ensure_future(_note(site, user, action, target, detail)))
        task.add_done_callback(_notes.discard)


async def _note(site: Site, user: str, action: str, target: str, detail: str) -> None:
    who = actor(site.fleet.settings, "flower", user)
    try:
        async with asyncio.timeout(LONGEST_NOTE):
            await (await store_of(site.fleet)).audit.note(who, action, target, detail)
    except (AgentException, RedisError, OSError) as error:
        log.warning("the audit has no entry of %s by %s: %s", action, user, error)
