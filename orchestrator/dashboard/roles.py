"""Roles at the door of every address of Flower: its own, and ours. What changes needs a role.

Whatever is not a GET needs an operator, unless its handler `needs` less: so does an address that a
later Flower adds.
"""

from collections.abc import Iterable
from typing import Any, ClassVar

from flower.api import BaseApiHandler
from flower.views import BaseHandler
from flower.views.auth import LoginHandler, LogoutHandler
from flower.views.error import NotFoundErrorHandler
from flower.views.monitor import Healthcheck, Metrics
from tornado import web
from tornado.routing import URLSpec

from stepfleet.orchestrator.dashboard.access import AccessRole, AccessRoles, known_user
from stepfleet.orchestrator.dashboard.api.records import Problem

OPEN = (LoginHandler, LogoutHandler, NotFoundErrorHandler, Healthcheck, Metrics)
"""What Flower shows to everybody. Static files are no handlers of Flower."""
READS = {"GET", "HEAD"}
_NO_USERS = "roles are set, and Flower has no users: start it with --basic-auth, or with OAuth"
_NO_ROLE = "your account has no role here: ask an operator to add it to flower_viewers"


def role_of(handler: Any) -> str:
    """Return the role of who makes a request."""
    return str(getattr(handler, "role", AccessRole.OPERATOR))


def guarded(routes: Iterable[Any], roles: AccessRoles) -> list[Any]:
    """Return addresses whose handlers ask for a role first; as they are where none is set."""
    if not roles.are_set:
        return list(routes)
    made: list[Any] = []
    for route in routes:
        if isinstance(route, URLSpec):
            own = _guard(route.handler_class, roles)
            made.append(URLSpec(route.regex.pattern, own, route.kwargs, route.name))
        else:
            pattern, handler, *rest = route
            made.append((pattern, _guard(handler, roles), *rest))
    return made


class Guarded(BaseHandler):
    """A handler that asks for a role before anything else; whom Flower does not know, it refuses.

    In front of another handler's class, with the `roles` of the site.
    """

    roles: ClassVar[AccessRoles]
    needs: ClassVar[AccessRole] = AccessRole.OPERATOR
    """The role that changes something here."""
    role: AccessRole | None = None

    def prepare(self) -> Any:
        """Refuse who lacks the role."""
        problem = self._why_not_by_role()
        if problem is None:
            return super().prepare()
        if not isinstance(self, BaseApiHandler):
            raise web.HTTPError(403, "%s", problem)
        self.set_status(403)
        self.set_header("Content-Type", "application/json; charset=UTF-8")
        return self.finish(Problem(error=problem).model_dump_json())

    def render(self, *args: Any, **values: Any) -> Any:
        """Show Flower's own pages without their buttons to who may not use them."""
        if "read_only" in values:
            values["read_only"] |= self.role is not AccessRole.OPERATOR
        return super().render(*args, **values)

    def _why_not_by_role(self) -> str | None:
        method = self.request.method
        if method == "OPTIONS":  # says nothing of the fleet
            return None
        if not self.current_user:
            if method not in READS:
                raise web.HTTPError(401, "log in first")
            return None
        if (user := known_user(self)) is None:
            return _NO_USERS
        self.role = self.roles.of(user)
        if self.role is None:
            return _NO_ROLE
        needed = AccessRole.VIEWER if method in READS else self.needs
        return (
            None if self.role >= needed else f"this needs the role {needed}; yours is {self.role}"
        )


def _guard(handler: Any, roles: AccessRoles) -> Any:
    if handler in OPEN or not issubclass(handler, BaseHandler):
        return handler
    about = {"roles": roles, "needs": getattr(handler, "needs", Guarded.needs)}
    return type(handler.__name__, (Guarded, handler), {**about, "__doc__": handler.__doc__})
