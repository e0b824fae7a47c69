"""What is read: runs, batches, results and exports, the fleet, costs, and the audit stream."""

import asyncio
import csv
import io
import logging
from collections.abc import Callable, Iterable, Mapping
from datetime import date
from functools import partial
from tempfile import TemporaryFile
from typing import Any, ClassVar

from tornado import web
from tornado.iostream import StreamClosedError

from stepfleet.orchestrator.batches.failures import Failures
from stepfleet.orchestrator.batches.files.openai_format import to_openai_line
from stepfleet.orchestrator.batches.results import as_line, full
from stepfleet.orchestrator.client.batch import AsyncBatch
from stepfleet.orchestrator.client.fleet import AsyncFleet, store_of
from stepfleet.orchestrator.dashboard.api.handling import (
    ApiHandler,
    MissingError,
    Parameter,
    ReadHandler,
    flag,
    whole,
)
from stepfleet.orchestrator.dashboard.api.records import (
    AuditPage,
    BatchReport,
    FleetReport,
    WorkersReport,
)
from stepfleet.orchestrator.errors import AgentException, ConfigurationError, StoreError
from stepfleet.orchestrator.records import exact_json
from stepfleet.orchestrator.records.batch import BatchPage
from stepfleet.orchestrator.records.calls.answers import AskCount
from stepfleet.orchestrator.records.ledger import Costs
from stepfleet.orchestrator.records.run.summary import RunPage, RunSummary, RunTimeline
from stepfleet.orchestrator.records.state import Lifecycle
from stepfleet.orchestrator.settings.settings import Settings
from stepfleet.orchestrator.store.fleet.checks import (
    Check,
    fail,
    fleet_checks,
    read_fleet,
    server_checks,
    stopping,
    versions,
)
from stepfleet.orchestrator.store.fleet.overview import is_paused, keepers, workers

KIND = "text/plain; charset=UTF-8"
SEND_SECONDS = 60.0
"""For which a client may take the text, until it is given up."""


class TextOf(ApiHandler):
    """A text of a step in full, as a file."""

    parameters: ClassVar = {
        "step": whole("the step", 1, 1_000_000),
        "part": Parameter("which text, as `cut` of the step names it"),
    }

    async def get(self, run_id: str) -> None:
        """Send the file, where texts of models are shown."""
        if not self.shows_content:
            raise web.HTTPError(403, "texts are not shown here (see docs/flower.md)")
        try:
            query = self.query()
        except ConfigurationError as error:
            return self.refuse(error, 400)
        if query.keys() != self.parameters.keys():
            return self.refuse(ConfigurationError("step and part: write both"), 400)
        try:
            with self.site.work.place():
                await self._send(run_id, **query)
        except ConfigurationError as error:
            return self.refuse(error, 404)
        except StoreError as error:
            return self.refuse(error, 503)
        return None

    async def _send(self, run_id: str, step: int, part: str) -> None:
        store = await store_of(self.site.fleet)
        text = await store.timelines.text(run_id, step, part)
        # Only names of texts that there are come so far.
        name = f"run-{run_id}-step-{step}-{part.replace(':', '-')}.txt"
        self.set_header("Content-Type", KIND)
        self.set_header("Content-Disposition", f'attachment; filename="{name}"')
        try:
            async with asyncio.timeout(SEND_SECONDS):
                await self.finish(text.encode(errors="replace"))
        except (StreamClosedError, TimeoutError):
            self.break_off()


log = logging.getLogger(__name__)

RESULTS_AT_ONCE = 65_536
"""Bytes of a file that are sent together."""

"""A client that takes no part for this time is given up."""
KINDS = {"jsonl": "application/x-ndjson", "csv": "text/csv; charset=UTF-8"}

Send = Callable[[bytes], None]


def _kind(text: str) -> str:
    if text not in KINDS:
        raise ValueError
    return text


class ResultsOf(ApiHandler):
    """The results of a batch's ended runs as a file: JSONL, or CSV."""

    parameters: ClassVar = {
        "format": Parameter("jsonl or csv", _kind),
        "failed": flag("only runs that did not complete"),
    }

    async def get(self, batch_id: str) -> None:
        """Send the file, where texts of models are shown."""
        if not self.shows_content:
            raise web.HTTPError(403, "results are not shown here (see docs/flower.md)")
        try:
            query = self.query()
            batch = await self._batch(batch_id)
        except ConfigurationError as error:
            return self.refuse(error, 404 if isinstance(error, MissingError) else 400)
        except AgentException as error:
            return self.refuse(error, 503)
        kind = query.get("format", "jsonl")
        self.set_header("Content-Type", KINDS[kind])
        name = f"batch-{batch.id}.{kind}"
        self.set_header("Content-Disposition", f'attachment; filename="{name}"')
        return await self._send_all(batch.id, kind, failed=query.get("failed", False))

    async def _batch(self, batch_id: str) -> AsyncBatch:
        try:
            return await self.site.fleet.batches.get(batch_id)
        except ConfigurationError as error:
            raise MissingError(error.message) from None

    async def _send_all(self, batch_id: str, kind: str, *, failed: bool) -> None:
        loop = asyncio.get_running_loop()

        def send(part: bytes) -> None:
            asyncio.run_coroutine_threadsafe(self._send(part), loop).result()

        write = write_csv if kind == "csv" else write_lines
        try:
            with self.site.work.place():
                await self.site.work.do(
                    self.site.fleet, partial(write, batch_id, failed=failed, send=send)
                )
        except (StreamClosedError, TimeoutError):
            self.break_off()
        except AgentException as error:
            if self._headers_written:
                log.warning("the results of batch %s end early: %s", batch_id, error)
                return self.break_off()
            self.clear_header("Content-Disposition")
            return self.refuse(error, 503)
        else:
            await self.finish()

    async def _send(self, part: bytes) -> None:
        self.write(part)
        async with asyncio.timeout(SEND_SECONDS):
            await self.flush()


async def write_lines(batch_id: str, fleet: AsyncFleet, *, failed: bool, send: Send) -> None:
    """Send a line for each result, in the order of the batch's lines."""
    batch = await fleet.batches.get(batch_id)
    is_openai = (await batch.progress()).format == "openai"
    line_of = to_openai_line if is_openai else full
    part = bytearray()
    async for result in batch.results(ordered=True, follow=False, failed=failed):
        part += as_line(line_of(result))
        if len(part) >= RESULTS_AT_ONCE:
            send(bytes(part))
            part.clear()
    send(bytes(part))


async def write_csv(batch_id: str, fleet: AsyncFleet, *, failed: bool, send: Send) -> None:
    """Send a table; its columns are known when all rows are on disk."""
    batch = await fleet.batches.get(batch_id)
    with await batch.table(follow=False, failed=failed) as table, TemporaryFile() as file:
        table.write_csv(file)
        file.seek(0)
        while part := file.read(RESULTS_AT_ONCE):
            send(part)


MOST = 500
_LIMIT = whole("how many", 1, MOST)
_CURSOR = Parameter("the `next` of the page before")


class Runs(ReadHandler):
    """Runs, the newest first."""

    parameters: ClassVar = {
        "status": Parameter("queued, in_progress, paused, completed, failed, cancelled or stopped"),
        "stop_reason": Parameter("why runs ended, as error or time_limit"),
        "agent": Parameter("the whole name of the agent"),
        "batch": Parameter("the batch's id"),
        "tenant": Parameter("the whole name; empty for runs without one"),
        "parent": Parameter("the run that has started them; empty for those that none has"),
        "error": Parameter("a part of the error's text"),
        "since": Parameter("the earliest creation, such as 2026-11-23T08:30Z; without a zone UTC"),
        "limit": _LIMIT,
        "where": Parameter(
            "of runs that did not complete: conditions as those of a retry, such as cause=KEY"
        ),
        "cursor": _CURSOR,
    }

    async def found(self, *_: str, **query: Any) -> RunPage:
        """Return a page."""
        return await self.site.fleet.runs.page(**query)


class Run(ReadHandler):
    """A run, and a page of its steps."""

    parameters: ClassVar = {
        "first": whole("the first step", 1, 1_000_000),
        "limit": whole("how many steps", 1, 100),
    }

    async def found(self, *path: str, **query: Any) -> RunTimeline:
        """Return the run."""
        fleet = self.site.fleet
        found = await fleet.runs.timeline(path[0], **query, content=self.shows_content)
        if not found.run.status.is_terminal:
            store = await store_of(fleet)
            found = found.model_copy(update={"fleet_paused": await is_paused(store)})
        moves = found.run.status in (Lifecycle.QUEUED, Lifecycle.IN_PROGRESS)
        if moves and not found.waits_for and (wait := await fleet.limits.wait_of(path[0])):
            return found.model_copy(update={"waits_for": str(wait).removeprefix("for ")})
        return found


class BatchesOf(ReadHandler):
    """Batches, the newest first."""

    parameters: ClassVar = {"limit": _LIMIT, "cursor": _CURSOR}

    async def found(self, *_: str, **query: Any) -> BatchPage:
        """Return a page."""
        return await self.site.fleet.batches.page(**query)


class OneBatch(ReadHandler):
    """A batch with its progress, stop reasons, and failures by cause."""

    parameters: ClassVar = {
        "failures": whole("how many failed runs are read to group them", 0, 5_000)
    }

    async def found(self, *path: str, **query: Any) -> BatchReport:
        """Return the batch."""
        batch = await self.site.fleet.batches.get(path[0])
        progress, most = await batch.progress(), query.get("failures", 1_000)
        bad = most and progress.done > progress.completed
        return BatchReport(
            progress=progress,
            failures=await batch.failures(limit=most) if bad else None,
            waits=await batch.limit_waits() if progress.open else (),
            asks=await self._approvals(batch.id) if progress.open else AskCount(),
        )

    async def _approvals(self, batch_id: str) -> AskCount:
        store = await store_of(self.site.fleet)
        return await self.site.asks.get(batch_id, partial(store.approvals.count_of_batch, batch_id))


class FleetState(ReadHandler):
    """Workers, the queue, limits, and what `stepfleet doctor` finds of the fleet and its servers.

    The servers are looked at every few seconds only.
    """

    async def found(self, *_: str, **__: Any) -> FleetReport:
        """Return the fleet."""
        fleet = self.site.fleet
        store = await store_of(fleet)
        servers = partial(asyncio.to_thread, _server_checks, store.settings)
        of_servers = await self.site.servers.get("", servers)
        read = await read_fleet(store)
        return FleetReport(
            overview=read.overview,
            limits=() if read.problem else tuple(await fleet.limits.use()),
            limits_problem=read.problem,
            checks=(*of_servers, *fleet_checks(read, store.settings.queue)),
        )


class WorkersOf(ReadHandler):
    """Workers as they last reported."""

    async def found(self, *_: str, **__: Any) -> WorkersReport:
        """Return the workers."""
        store = await store_of(self.site.fleet)
        found, kept = await workers(store), await keepers(store)
        wrong = (versions((*found, *kept)), *stopping(found))
        return WorkersReport(workers=tuple(found), keepers=tuple(kept), checks=wrong)


class FleetFailures(ReadHandler):
    """The newest runs that did not complete, by cause: up to 500 failed and 500 stopped ones.

    The same question is answered anew after some seconds only.
    """

    parameters: ClassVar = {name: Runs.parameters[name] for name in ("agent", "tenant", "since")}

    async def found(self, *_: str, **query: Any) -> Failures:
        """Return the causes."""
        read = partial(self.site.fleet.runs.failures, **query)
        return await self.site.failures.get(tuple(sorted(query.items())), read)


class CostsOf(ReadHandler):
    """What model calls have cost."""

    parameters: ClassVar = {
        "by": Parameter("day, tenant, batch, agent, model, lane, status; several with commas"),
        "since": Parameter("the first day, such as 2026-11-23", date.fromisoformat),
        "until": Parameter("the last day, such as 2026-11-23", date.fromisoformat),
        "tenant": Parameter("of one tenant; empty for runs without one"),
        "batch": Parameter("of one batch"),
        "agent": Parameter("of one agent"),
        "model": Parameter("of one model, with or without its provider"),
        "lane": Parameter("of one tier: standard, flex, priority, batch, ..."),
        "status": Parameter("committed, lost, ambiguous or cached"),
    }

    async def found(self, *_: str, **query: Any) -> Costs:
        """Return the sums."""
        return await self.site.fleet.costs(query.pop("by", ""), **query)


class AuditOf(ReadHandler):
    """What people and programs have changed, the newest first."""

    parameters: ClassVar = {"limit": _LIMIT}

    async def found(self, *_: str, **query: Any) -> AuditPage:
        """Return the entries."""
        store = await store_of(self.site.fleet)
        found = await store.audit.newest(query.get("limit", 100))
        return AuditPage(entries=tuple(entry for _, entry in found))


def _server_checks(settings: Settings) -> tuple[Check, ...]:
    try:
        return tuple(server_checks(settings))
    except AgentException as error:
        return (fail("Redis", str(error), "see the message"),)


AT_ONCE, PAGE = 4, 500
USUAL, MOST_EXPORTED = 100_000, 1_000_000
"""Runs of a file whose `limit` is not given, and of any."""

"""A client that takes no part for this time is given up."""
COLUMNS = tuple(RunSummary.model_fields)
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


class RunsExport(ApiHandler):
    """The newest runs of a filter as a file."""

    parameters: ClassVar[Mapping[str, Parameter]] = {
        **{name: one for name, one in Runs.parameters.items() if name != "cursor"},
        "limit": whole("how many runs at most", 1, MOST_EXPORTED),
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
