"""What is read: runs, batches, the fleet, costs, and what was done from here."""

import asyncio
from datetime import date
from functools import partial
from typing import Any, ClassVar

from stepfleet.orchestrator.batches.failures import Failures
from stepfleet.orchestrator.client.fleet import store_of
from stepfleet.orchestrator.dashboard.api.handling import Parameter, ReadHandler, whole
from stepfleet.orchestrator.dashboard.api.records import (
    AuditEntry,
    AuditPage,
    BatchReport,
    FleetReport,
    WorkersReport,
)
from stepfleet.orchestrator.errors import AgentException
from stepfleet.orchestrator.records.batch import BatchPage
from stepfleet.orchestrator.records.calls.answers import AskCount
from stepfleet.orchestrator.records.ledger import Costs
from stepfleet.orchestrator.records.run.summary import RunPage, RunTimeline
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
from stepfleet.orchestrator.store.fleet.overview import is_paused, workers

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
        "since": Parameter("the earliest creation, as 2026-11-23T08:30Z; without a zone UTC"),
        "limit": _LIMIT,
        "where": Parameter(
            "of runs that did not complete: conditions as those of a retry, as cause=KEY"
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
            asks=await self._asks(batch.id) if progress.open else AskCount(),
        )

    async def _asks(self, batch_id: str) -> AskCount:
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
        found = await workers(store)
        return WorkersReport(workers=tuple(found), checks=(versions(found), *stopping(found)))


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
        "since": Parameter("the first day, as 2026-11-23", date.fromisoformat),
        "until": Parameter("the last day, as 2026-11-23", date.fromisoformat),
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
    """What was done from here, the newest first."""

    parameters: ClassVar = {"limit": _LIMIT}

    async def found(self, *_: str, **query: Any) -> AuditPage:
        """Return the entries."""
        store = await store_of(self.site.fleet)
        found = await store.audit.newest(query.get("limit", 100))
        return AuditPage(entries=tuple(AuditEntry(**one) for one in found))


def _server_checks(settings: Settings) -> tuple[Check, ...]:
    try:
        return tuple(server_checks(settings))
    except AgentException as error:
        return (fail("Redis", str(error), "see the message"),)
