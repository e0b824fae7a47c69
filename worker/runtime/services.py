"""What a worker process is made of: put together once per event loop, from the settings.

Starts with the process: leases are renewed and overdue runs rescued also while no task comes.
"""

import asyncio
import logging
import math
import os
import random
import secrets
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from celery import Celery
from redis.exceptions import RedisError

from stepfleet.orchestrator.agents.agent import Agent
from stepfleet.orchestrator.errors import AgentException, StoreError
from stepfleet.orchestrator.memory.tokens import TokenCounters
from stepfleet.orchestrator.models.pricing import RecentPrices
from stepfleet.orchestrator.protocol.claim import Refusal, Refused, StepHint
from stepfleet.orchestrator.protocol.waiting import ToolHint
from stepfleet.orchestrator.records.usage import UsageStats
from stepfleet.orchestrator.settings.settings import Settings
from stepfleet.orchestrator.store import keys
from stepfleet.orchestrator.store.events.text_chunks import Chunks
from stepfleet.orchestrator.store.fleet_overview import forget_workers
from stepfleet.orchestrator.store.health import server_info, warnings
from stepfleet.orchestrator.store.opening.opening import OpenStore, open_store
from stepfleet.orchestrator.store.quarantine import keep_aside
from stepfleet.orchestrator.store.response_cache import CacheEntries
from stepfleet.orchestrator.store.runs.isolation_marks import TrialMarks
from stepfleet.orchestrator.store.runs.steps import StepStore, Terms
from stepfleet.worker.agents.local import LocalAgents
from stepfleet.worker.agents.mcp_sources import OpenSources, check_sources, sources_of
from stepfleet.worker.agents.response_cache import ResponseCache
from stepfleet.worker.agents.streaming import Teller
from stepfleet.worker.attempt.tool_task import CallReport, run_call
from stepfleet.worker.engine.bridge import PerLoop, end_tasks, home_loop
from stepfleet.worker.engine.time_limits import TimeLimits
from stepfleet.worker.events.courier import Courier
from stepfleet.worker.events.outlets import couriers
from stepfleet.worker.events.subscribers import Listening, SubscriberObserver
from stepfleet.worker.events.text_chunks import ChunkSender
from stepfleet.worker.leases.blocked_loop import Standby
from stepfleet.worker.leases.lease import HELD_HERE, Leases
from stepfleet.worker.leases.renewal import RENEWALS_PER_LEASE, Renewal, connecting, renewing
from stepfleet.worker.ports import Ports
from stepfleet.worker.runtime.batch_housekeeping import keep_up
from stepfleet.worker.runtime.crash_points import Visit, crash_points, unharmed
from stepfleet.worker.runtime.heartbeat import Report
from stepfleet.worker.runtime.housekeeping import tidy
from stepfleet.worker.runtime.isolation.isolation import Isolation
from stepfleet.worker.runtime.isolation.processes import IsolatedProcesses
from stepfleet.worker.runtime.rescuer import Rescuer
from stepfleet.worker.runtime.shutdown import Stopping
from stepfleet.worker.step import StepReport, run_step
from stepfleet.worker.telemetry import step_logger
from stepfleet.worker.telemetry.instrumentation import import_exporters, instrument
from stepfleet.worker.toolbox.box import LocalToolbox

log = logging.getLogger(__name__)

SETTLE_SECONDS = 5.0
LAST_SECONDS = 1.0
"""How long a stopping worker repeats calls to a Redis that is away: the bound is for its end."""


class LoopServices:
    """The collaborators of the steps that run in one event loop."""

    consumes = True
    """Whether this process takes tasks from the queues."""

    def __init__(
        self,
        settings: Settings,
        agents: Iterable[Agent],
        app: Celery,
        leases: Leases,
        crash: Visit = unharmed,
        patience: float | None = None,
        *,
        alone: bool = False,
    ) -> None:
        self._settings = settings
        self._patience = settings.patience if patience is None else patience
        self._agents = list(agents)
        self._alone = alone
        self._app = app
        self._leases = leases
        self._crash = crash
        self._watching = instrument(settings, worker_name())
        self._models = self._watching.models()
        self._toolbox = self._watching.toolbox(LocalToolbox(settings.tool_threads))
        self._listening = Listening()
        self._chunks: ChunkSender | None = None
        self._cache: ResponseCache | None = None
        self._couriers: list[Courier] = []
        self._counters = TokenCounters()
        self._opening: asyncio.Task[Ports] | None = None
        self._watches: list[asyncio.Task[None]] = []
        self._store: OpenStore | None = None
        self._has_ended = False
        self._sources: OpenSources | None = None
        self._isolation: Isolation | None = None
        self._renewal: Renewal

    async def ports(self) -> Ports:
        """Return the ports of steps; the first call connects. Raises `StoreError`."""
        if self._opening is None or (self._opening.done() and self._opening.exception()):
            if self._has_ended:
                msg = "this worker is ending and connects no more"
                raise StoreError(msg)
            self._opening = asyncio.create_task(self._open())
        return await asyncio.shield(self._opening)

    @property
    def store(self) -> OpenStore:
        """The open store. Raises `StoreError` before the first `ports()`."""
        if self._store is None:
            msg = "the store is not open yet"
            raise StoreError(msg)
        return self._store

    async def check(self, run_id: str, batch_id: str = "") -> None:
        """Renew what is held here of a run, or of a batch; heed what the store says is wanted."""
        await self.ports()
        await self._renewal.renew(run_id, batch_id)

    async def run_step(self, hint: StepHint, ports: Ports | None = None) -> StepReport:
        """Do the step that `hint` names, paced among the others of this loop."""
        ports = ports or await self.ports()
        with ports.pacing:
            return await run_step(hint, ports, self._leases)

    async def run_call(self, hint: ToolHint, ports: Ports | None = None) -> CallReport:
        """Make the tool call that `hint` names."""
        return await run_call(hint, ports or await self.ports(), self._leases)

    def be_patient(self, seconds: float) -> None:
        """Let calls to the store, also those that wait already, wait so long for it."""
        self._patience = seconds
        if self._store:
            self._store.connection.patience = seconds

    async def put_aside(self, entry: bytes) -> None:
        """Keep a message that may not be acted on, for people. Raises `StoreError`."""
        await self.ports()
        await keep_aside(self.store.connection, entry)

    async def settle(self) -> None:
        """Give subscribers and readers of text a few seconds to hear what was told."""
        beside = (self._listening, self._chunks, self._cache)
        await asyncio.gather(*(one.settle(SETTLE_SECONDS) for one in beside if one))

    async def aclose(self) -> None:
        """End the watches and disconnect."""
        self._has_ended = True
        self.be_patient(min(self._patience, LAST_SECONDS))
        if self._opening:
            await end_tasks([self._opening])
        await end_tasks(self._watches)
        if self._isolation:
            await self._isolation.aclose()
        await self._leases.settle(LAST_SECONDS)  # claims whose reply nobody waited for go back
        await self.settle()
        await self._listening.aclose()
        await self._watching.aclose()
        await self._models.aclose()
        if self._sources:
            await self._sources.aclose()
        for courier in self._couriers:
            await courier.aclose()
        if self._store:
            with suppress(AgentException):
                await self._store.connection.execute("HDEL", keys.WORKERS, worker_name())
            await self._store.aclose()

    async def _open(self) -> Ports:
        opened = self._store = await open_store(self._settings, self._app)
        try:
            return await self._set_up(opened)
        except BaseException:
            await self._let_go(opened)
            raise

    async def _let_go(self, opened: OpenStore) -> None:
        """Leave nothing behind of a store that could not be set up: the next try opens another."""
        await end_tasks(self._watches)
        for courier in self._couriers:
            await courier.aclose()
        self._watches, self._couriers, self._store = [], [], None
        await opened.aclose()

    async def _set_up(self, opened: OpenStore) -> Ports:
        settings = self._settings
        opened.connection.patience = self._patience
        for warning in warnings(await server_info(opened.connection)):
            log.warning(warning)
        terms = Terms(settings.lease, settings.grace, settings.retention, worker_name())
        store = StepStore(
            opened.connection, opened.keys, opened.configs, opened.dispatch, terms, self._crash
        )
        renew, standby = renewing(store), None
        if self.consumes:  # a process that consumes nothing ends itself when it is stuck
            connect = connecting(settings, self._app, terms)
            limit = settings.blocked_limit
            standby = Standby(self._leases, connect, lease=terms.lease, limit=limit)
        self._renewal = Renewal(self._leases, renew, settings.lease, standby)
        await store.prepare()
        for agent in self._agents:
            await opened.configs.announce(agent.config)
        await forget_workers(opened)
        self._sources = self._sources or sources_of(self._agents)
        if self.consumes:
            self._couriers = await couriers(opened, worker_name(), random.random)
        processes = None
        if self._alone:
            processes = IsolatedProcesses(draining=lambda: self._leases.draining)
        marks = TrialMarks(opened.connection, opened.keys, opened.dispatch)
        self._isolation = Isolation(settings.poison_limit, settings.grace, renew, marks, processes)
        ports = self._ports(opened, store)
        self._watches = self._watching_over(opened)
        self._watches += [asyncio.create_task(one.watch()) for one in self._couriers]
        return ports

    def _ports(self, opened: OpenStore, store: StepStore) -> Ports:
        settings = self._settings
        connection = opened.connection
        self._chunks = ChunkSender(Chunks(connection, opened.keys), connection.now)
        teller = Teller(self._chunks, self._listening)
        subscribers = {one.name: one.subscribers for one in self._agents if one.subscribers}
        listener = (SubscriberObserver(subscribers, self._listening),) if subscribers else ()
        logger = step_logger(as_json=settings.log_format == "json")
        glance = RecentPrices()

        def cost(model: str, usage: UsageStats) -> float:
            return glance.prices().cost_of(model, usage)

        cache = self._cache = ResponseCache(CacheEntries(connection, settings.cache_bytes), cost)
        return Ports(
            store=store,
            calls=store.calls,
            agent=LocalAgents(self._agents, self._models, teller, self._sources, cache).find,
            toolbox=self._toolbox,
            cost=cost,
            elapsed=time.monotonic,
            jitter=random.random,
            token=lambda: secrets.token_hex(8),
            crash=self._crash,
            worker=worker_name(),
            poison_limit=settings.poison_limit,
            patience=settings.grace,
            tokens=self._counters.of,
            isolation=self._isolation if self.consumes else None,
            observers=(*listener, *logger, *self._watching.observers()),
        )

    def _watching_over(self, opened: OpenStore) -> list[asyncio.Task[None]]:
        """Start what looks after runs, leases and reports for as long as this loop works."""
        rescuer = Rescuer(
            opened.connection,
            opened.keys,
            opened.dispatch,
            grace=self._settings.grace,
            interval=self._settings.rescue_interval,
            long_queue=self._settings.slots,
            jitter=random.random,
        )
        rescuer.calm = rescuer.clock.tolerance = self._settings.lease / RENEWALS_PER_LEASE
        report = Report(
            worker_name(),
            self._agents,
            held=lambda: len(self._leases.steps),
            app=self._app if self.consumes else None,
            pause=self._settings.lease / RENEWALS_PER_LEASE,
        )
        lookouts = self._watching.background(
            lambda: len(self._leases.steps), lambda: len(self._leases.calls)
        )
        watches = [
            asyncio.create_task(
                rescuer.watch(self._crash, self._watching.rescued), name="stepfleet-rescuer"
            ),
            asyncio.create_task(self._renewal.watch(), name="stepfleet-leases"),
            asyncio.create_task(report.watch(opened), name="stepfleet-report"),
            asyncio.create_task(tidy(opened), name="stepfleet-tidying"),
            asyncio.create_task(keep_up(opened, random.random), name="stepfleet-upkeep"),
        ]
        return [*watches, *(asyncio.create_task(one) for one in lookouts)]


class Services:
    """The services of a worker process, in whichever loop its pool runs steps."""

    def __init__(
        self,
        settings: Settings,
        agents: Iterable[Agent],
        app: Celery,
        *,
        alone: bool = False,
    ) -> None:
        agents = tuple(agents)
        check_sources(agents)
        import_exporters(settings)
        self._settings = settings
        self.leases = Leases(time.monotonic)
        self.crash = crash_points(os.environ)
        self.stopping = Stopping(settings.drain)
        self.limits = TimeLimits()
        self._made: LoopServices | None = None

        def make() -> LoopServices:
            # A model's answer is worth waiting for Redis, however long that takes.
            patience = 0.0 if self.leases.draining else math.inf
            self._made = LoopServices(
                settings, agents, app, self.leases, self.crash, patience, alone=alone
            )
            return self._made

        self._loop: Callable[[], LoopServices] = PerLoop(make, LoopServices.aclose)

    async def run_step(self, hint: StepHint) -> StepReport:
        """Do the step that `hint` names; a stopping worker refuses."""
        self.crash("message-popped")
        if refusal := await self._refusal(hint):
            return StepReport(hint, refusal=refusal)
        try:
            return await self._loop().run_step(hint)
        except StoreError:
            if not self.leases.draining:
                raise
            return StepReport(hint, refusal=Refusal(Refused.DRAINING))

    async def run_call(self, hint: ToolHint) -> CallReport:
        """Make the tool call that `hint` names; a stopping worker refuses."""
        if refusal := await self._refusal(hint):
            return CallReport(hint, refusal=refusal)
        return await self._loop().run_call(hint)

    async def _refusal(self, hint: StepHint | ToolHint) -> Refusal | None:
        if self.leases.draining:
            return Refusal(Refused.DRAINING)
        if await self.leases.keeps(hint):
            await self._loop().check(hint.run_id)
            return Refusal(Refused.LEASED, HELD_HERE)
        return None

    async def put_aside(self, entry: bytes) -> None:
        """Keep a message that may not be acted on, for people. Raises `StoreError`."""
        await self._loop().put_aside(entry)

    def start(self) -> None:
        """Connect and start the watches in this process's loop. Safe to call again."""
        home_loop().submit(lambda: asyncio.ensure_future(self._started()))

    def drain(self) -> None:
        """Take no new steps; hand back what is still held after the drain time."""
        self.leases.draining = True
        self._be_patient(self._settings.drain)
        asyncio.get_running_loop().call_later(self._settings.drain, self.hand_back)

    def hand_back(self) -> None:
        """Take no new steps; hand back what is held, at once."""
        self.leases.draining = True
        self._be_patient(LAST_SECONDS)
        self.leases.hand_back()

    def interrupt(self, run_id: str = "", batch_id: str = "") -> None:
        """Break off what is held here of a run, or of a batch, if the store says so."""
        if batch_id or self.leases.of(run_id):
            home_loop().submit(lambda: asyncio.ensure_future(self._loop().check(run_id, batch_id)))

    def _be_patient(self, seconds: float) -> None:
        if self._made is not None:
            self._made.be_patient(min(seconds, self._settings.patience))

    async def _started(self) -> None:
        self.stopping.heed(self.drain, self.hand_back)
        told = ""
        while True:
            try:
                await self._loop().ports()
            except (AgentException, RedisError, OSError) as error:
                if str(error) != told:
                    told = str(error)
                    log.warning("waiting for the store: %s", error)
                await asyncio.sleep(1)
            else:
                return


def worker_name() -> str:
    """Return this process's name: host and process id."""
    return f"{socket.gethostname()}:{os.getpid()}"
