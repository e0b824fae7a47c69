"""Refused messages in Flower, without their contents; and its metrics, behind a password."""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from flower.api import BaseApiHandler
from flower.views import BaseHandler
from flower.views.monitor import Metrics
from tornado import web

from stepfleet.orchestrator.store.fleet.quarantine import reasons

SHOWN = 100
"""Messages that the page lists; it counts all."""

Read = Callable[[], list[dict[str, Any]]]
"""Returns the facts of the messages, the newest first; may block."""

_LATEST = 4_102_444_800.0  # the year 2100: the time comes from a message and may be anything


def quarantine_routes(read: Read) -> list[Any]:
    """Return the pages' addresses."""
    return [
        web.url("/quarantine", QuarantinePage, {"read": read}, name="quarantine"),
        web.url("/api/quarantine", QuarantineApi, {"read": read}),
        web.url("/metrics", GuardedMetrics),
    ]


class QuarantinePage(BaseHandler):
    """The page; Flower's own authentication guards it."""

    def initialize(self, read: Read) -> None:
        """Store the reader of the quarantine."""
        self._read = read

    @web.authenticated
    async def get(self) -> None:
        """Show counts by reason, and the newest messages without their contents."""
        found = await asyncio.to_thread(self._read)
        entries = [{**one, "when": _when(one["at"])} for one in found]
        self.render("quarantine.html", entries=entries, reasons=reasons(found), shown=SHOWN)


class QuarantineApi(BaseApiHandler):
    """The same as JSON, for monitoring."""

    def initialize(self, read: Read) -> None:
        """Store the reader of the quarantine."""
        self._read = read

    @web.authenticated
    async def get(self) -> None:
        """Answer with the number of messages, in total and by reason."""
        found = await asyncio.to_thread(self._read)
        self.write({"messages": len(found), "reasons": reasons(found)})


class GuardedMetrics(Metrics):
    """Flower's metrics page, behind its authentication; without a password for this machine only.

    Metrics name workers, agents and steps.
    """

    @web.authenticated
    async def get(self) -> None:
        """Answer in Prometheus's format."""
        await super().get()


def _when(at: float) -> str:
    known = 0 <= at < _LATEST
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S") if known else "unknown"
