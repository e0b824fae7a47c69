"""The runs of a filter as a file, JSONL or CSV: read page by page, as fast as it is taken."""

import asyncio
import csv
import io
import logging
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from tornado import web
from tornado.iostream import StreamClosedError

from stepfleet.orchestrator.dashboard.api.handling import ApiHandler, Parameter, whole
from stepfleet.orchestrator.dashboard.api.reads import Runs
from stepfleet.orchestrator.errors import AgentException, ConfigurationError
from stepfleet.orchestrator.records import exact_json
from stepfleet.orchestrator.records.run.summary import RunPage, RunSummary

log = logging.getLogger(__name__)

KINDS = {"jsonl": "application/x-ndjson", "csv": "text/csv; charset=UTF-8"}
AT_ONCE, PAGE = 4, 500
USUAL, MOST = 100_000, 1_000_000
"""Runs of a file whose `limit` is not given, and of any."""
SEND_SECONDS = 60.0
"""After so long without taking a part, a client is given up."""
COLUMNS = tuple(RunSummary.model_fields)
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def _kind(text: str) -> str:
    if text not in KINDS:
        raise ValueError
    return text


class RunsExport(ApiHandler):
    """The newest runs of a filter as a file."""

    parameters: ClassVar[Mapping[str, Parameter]] = {
        **{name: one for name, one in Runs.parameters.items() if name != "cursor"},
        "limit": whole("how many runs at most", 1, MOST),
        "format": Parameter("jsonl or csv", _kind),
    }
    _open: ClassVar[int] = 0

    async def get(self) -> None:
        """Send the file."""
        try:
            query = self.query()
        except ConfigurationError as error:
            return self.refuse(error, 400)
        if RunsExport._open >= AT_ONCE:
            raise web.HTTPError(503, f"{AT_ONCE} files are being sent already; try again later")
        RunsExport._open += 1
        try:
            await self._send(query.pop("format", "jsonl"), query.pop("limit", USUAL), query)
        except (StreamClosedError, TimeoutError):
            self.break_off()
        except AgentException as error:
            if not self._headers_written:
                return self.refuse(error, 400 if isinstance(error, ConfigurationError) else 503)
            log.warning("a file of runs ends early: %s", error)
            self.break_off()
        finally:
            RunsExport._open -= 1
        return None

    async def _send(self, kind: str, left: int, which: dict[str, Any]) -> None:
        page = await self._page(left, which)
        self.set_header("Content-Type", KINDS[kind])
        self.set_header("Content-Disposition", f'attachment; filename="runs.{kind}"')
        if kind == "csv":
            self.write(_csv([COLUMNS]))
        while True:
            rows = [run.model_dump(mode="json") for run in page.runs]
            as_csv = kind == "csv"
            self.write(_csv(map(_cells, rows)) if as_csv else b"".join(map(_line, rows)))
            async with asyncio.timeout(SEND_SECONDS):
                await self.flush()
            left -= len(rows)
            if not left or page.next is None:
                return
            page = await self._page(left, {**which, "cursor": page.next})

    async def _page(self, left: int, which: dict[str, Any]) -> RunPage:
        return await self.site.fleet.runs.page(limit=min(left, PAGE), **which)


def _line(row: Mapping[str, Any]) -> bytes:
    return exact_json.dumps(row) + b"\n"


def _cells(row: Mapping[str, Any]) -> list[object]:
    """Return the cells of a row. Text that a spreadsheet would take for a formula gets a quote."""
    cells = (row[name] for name in COLUMNS)
    return [f"'{c}" if isinstance(c, str) and c.startswith(_FORMULA) else c for c in cells]


def _csv(rows: Iterable[Iterable[object]]) -> str:
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue()
