"""Runs Flower on the fleet's broker, in this process. Does not know runs."""

import asyncio
import os
import resource
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from celery import Celery
from flower.app import Flower
from flower.options import options
from flower.urls import handlers, settings
from tornado.httpserver import HTTPServer
from tornado.httputil import HTTPMessageDelegate, HTTPServerRequest
from tornado.iostream import IOStream
from tornado.netutil import bind_sockets
from tornado.web import ErrorHandler

from stepfleet.orchestrator.dashboard.access import check_access, host_of, is_loopback, users_of
from stepfleet.orchestrator.dashboard.api.handling import Site
from stepfleet.orchestrator.dashboard.api.routes import api_routes
from stepfleet.orchestrator.dashboard.quarantine import Read, quarantine_routes
from stepfleet.orchestrator.dashboard.roles import guarded
from stepfleet.orchestrator.dashboard.tasks import adapt
from stepfleet.orchestrator.dashboard.web import Templates, page_routes
from stepfleet.orchestrator.errors import ConfigurationError

MAX_TASKS = 10_000
"""Steps that Flower keeps in memory; its default is 100,000."""

SAVE_MILLISECONDS = 60_000
"""How often kept tasks are written; also when Flower ends."""
MOST_CONNECTIONS = 4_000
"""At a time, and not more than half of the files that the process may open."""
IDLE_SECONDS, BODY_SECONDS = 120.0, 600.0
"""How long a connection waits for its next request, and for the rest of one's body."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where Flower listens, the `user:password`s of its users, and where it keeps its tasks."""

    host: str
    port: int
    basic_auth: str | None = None
    kept: Path | None = None


class Server(HTTPServer):
    """Flower's server. Connections beyond a number are closed at once.

    Tornado alone runs out of files, and then tries and logs without a pause.
    """

    def handle_stream(self, stream: IOStream, address: Any) -> None:
        """Serve a connection."""
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        most = MOST_CONNECTIONS if files < 0 else min(files // 2, MOST_CONNECTIONS)
        if len(self._connections) >= most:
            stream.close()
        else:
            super().handle_stream(stream, address)


class Dashboard(Flower):
    """Flower that, without authentication, answers only requests addressed to this machine.

    Otherwise a web page could read it through the visitor's browser, by a name that resolves to
    127.0.0.1.
    """

    def start_http_server(self) -> int:
        """Listen, and return the port. A client that says nothing is not waited for."""
        sockets = bind_sockets(self.options.port, address=self.options.address)
        server = Server(self, idle_connection_timeout=IDLE_SECONDS, body_timeout=BODY_SECONDS)
        server.add_sockets(sockets)
        return int(sockets[0].getsockname()[1])

    def find_handler(self, request: HTTPServerRequest, **kwargs: Any) -> HTTPMessageDelegate:
        """Return the handler of the request."""
        trusted = self.options.basic_auth or is_loopback(host_of(request.host))
        if trusted:
            found: HTTPMessageDelegate = super().find_handler(request, **kwargs)
            return found
        refused: HTTPMessageDelegate = self.get_handler_delegate(
            request, ErrorHandler, {"status_code": 403}
        )
        return refused


def serve(
    app: Celery, address: Address, ready: Callable[[str], None], read: Read, site: Site
) -> None:
    """Serve until SIGINT or SIGTERM; `ready` receives the URL. `read` reads the quarantine.

    Raises `ConfigurationError` for an address that is open to others without authentication, or
    cannot be bound.
    """
    check_access(address.host, address.basic_auth)
    site.roles.check(address.basic_auth)
    _configure(address)
    adapt()
    handlers[:] = guarded(handlers, site)
    # Tornado uses the thread's loop, which Python no longer creates by itself.
    asyncio.set_event_loop(asyncio.new_event_loop())
    pages = Templates(str(settings["template_path"]))
    flower = Dashboard(capp=app, options=options, **settings, template_loader=pages)
    own = [*quarantine_routes(read), *page_routes(site), *api_routes(site)]
    flower.add_handlers(".*", guarded(own, site))
    try:
        port = flower.start_http_server()
    except OSError as error:
        msg = (
            f"port {address.port} on {address.host} cannot be used: {error.strerror}; name another "
            "by --port"
        )
        raise ConfigurationError(msg) from None
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: flower.io_loop.add_callback_from_signal(flower.stop))
    ready(f"http://{address.host}:{port}")
    flower.start()


def _configure(address: Address) -> None:
    options.address = address.host
    options.port = address.port
    options.max_tasks = MAX_TASKS
    options.enable_events = True
    options.basic_auth = users_of(address.basic_auth)
    if address.kept is not None:
        os.umask(0o077)  # it names runs, agents and failures
        options.persistent = True
        options.db = str(address.kept)
        options.state_save_interval = SAVE_MILLISECONDS
    settings["debug"] = False
    settings["cookie_secret"] = options.cookie_secret
