"""Flower's page about messages that were put aside: how many, why, when. Never what they hold."""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flower.api import BaseApiHandler
from flower.views import BaseHandler
from tornado import web
from tornado.template import Loader, Template

from stepfleet.orchestrator.store.quarantine import reasons

SHOWN = 100
"""Messages that the page lists; it counts all."""

Read = Callable[[], list[dict[str, Any]]]
"""Returns what is known of the messages, the newest first; may block."""

_OWN = Path(__file__).parent / "templates"
_LATEST = 4_102_444_800.0  # 2100: whoever writes to Redis writes what he likes
_TAB = b"""
        <li class="nav-item">
          <a class="nav-link{% if active_tab == 'quarantine' %} active{% end %}"
            href="{{ reverse_url('quarantine') }}">Quarantine</a>
        </li>
      </ul>"""


def routes(read: Read) -> list[Any]:
    """Return the page's and the API's addresses."""
    return [
        web.url("/quarantine", QuarantinePage, {"read": read}, name="quarantine"),
        web.url("/api/quarantine", QuarantineApi, {"read": read}),
    ]


class Pages(Loader):
    """Flower's templates and ours; a tab of ours stands behind Flower's own."""

    def _create_template(self, name: str) -> Template:
        own = _OWN / name
        text = own.read_bytes() if own.is_file() else (Path(self.root) / name).read_bytes()
        if name == "navbar.html":
            text = text.replace(b"\n      </ul>", _TAB, 1)
        return Template(text, name=name, loader=self)


class QuarantinePage(BaseHandler):
    """The page; Flower's own authentication guards it."""

    def initialize(self, read: Read) -> None:
        """Take what reads the quarantine."""
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
        """Take what reads the quarantine."""
        self._read = read

    @web.authenticated
    async def get(self) -> None:
        """Answer with the number of messages, and how often each reason occurs."""
        found = await asyncio.to_thread(self._read)
        self.write({"messages": len(found), "reasons": reasons(found)})


def _when(at: float) -> str:
    known = 0 <= at < _LATEST
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S") if known else "unknown"
