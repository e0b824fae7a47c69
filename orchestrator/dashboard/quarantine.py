"""Refused messages in Flower, without their contents; and its metrics, behind a password."""

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

from flower.api import BaseApiHandler
from flower.views import BaseHandler
from flower.views.monitor import Metrics
from tornado import web

from stepfleet.orchestrator.client.fleet import store_of
from stepfleet.orchestrator.dashboard.access import visible
from stepfleet.orchestrator.dashboard.api.handling import Site
from stepfleet.orchestrator.errors import AgentException
from stepfleet.orchestrator.records.text.redaction import redact_error
from stepfleet.orchestrator.store import keys
from stepfleet.orchestrator.store.fleet.quarantine import about_entries, reasons

SHOWN = 100
"""Messages that the page lists; it counts all."""

_TEXTS = ("queue", "reason")

Read = Callable[[], Awaitable[list[dict[str, Any]]]]
"""Returns the facts of the messages, the newest first."""

_LATEST = 4_102_444_800.0  # the year 2100: the time comes from a message and may be anything


def quarantine_routes(read: Read) -> list[Any]:
    """Return the pages' addresses."""
    return [
        web.url("/quarantine", QuarantinePage, {"read": read}, name="quarantine"),
        web.url("/api/quarantine", QuarantineApi, {"read": read}),
        web.url("/metrics", GuardedMetrics),
    ]


def refused_by(site: Site) -> Read:
    """Return a reader of the messages in quarantine in the fleet's own Redis."""

    async def read() -> list[dict[str, Any]]:
        store = await store_of(site.fleet)
        key = store.keys.of(keys.QUARANTINE)
        if await store.connection.execute("TYPE", key) != "list":
            return []
        return about_entries(await store.connection.execute("LRANGE", key, 0, -1))

    return read


class QuarantinePage(BaseHandler):
    """The page; Flower's own authentication guards it."""

    def initialize(self, read: Read) -> None:
        """Store the reader of the quarantine."""
        self._read = read

    @web.authenticated
    async def get(self) -> None:
        """Show counts by reason, and the newest messages without their contents."""
        found = await _found(self._read)
        entries = [
            {**one, "when": _when(one["at"]), **{name: visible(one[name]) for name in _TEXTS}}
            for one in found
        ]
        self.render("quarantine.html", entries=entries, reasons=reasons(entries), shown=SHOWN)


class QuarantineApi(BaseApiHandler):
    """The same as JSON, for monitoring."""

    def initialize(self, read: Read) -> None:
        """Store the reader of the quarantine."""
        self._read = read

    @web.authenticated
    async def get(self) -> None:
        """Answer with the number of messages, in total and by reason."""
        found = await _found(self._read)
        self.write({"messages": len(found), "reasons": reasons(found)})


class GuardedMetrics(Metrics):
    """Flower's metrics page, behind its authentication; without a password for this machine only.

    Metrics name workers, agents and steps.
    """

    @web.authenticated
    async def get(self) -> None:
        """Answer in Prometheus's format."""
        await super().get()


async def _found(read: Read) -> list[dict[str, Any]]:
    """Return what is read. Raises `HTTPError` 503 where Redis is away."""
    try:
        return await read()
    except AgentException as error:
        raise web.HTTPError(503, "%s", redact_error(error.message)) from None


def _when(at: float) -> str:
    known = 0 <= at < _LATEST
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S") if known else "unknown"
