"""The services of a worker process: what its steps need in their event loop, and its stages.

Starts with the process: leases are renewed and overdue runs rescued also while no task comes.
"""

import asyncio
import logging
import math
import os
import random
import time
from collections.abc import Callable, Iterable
from typing import Any

from celery import Celery
from redis.exceptions import RedisError

from stepfleet.orchestrator.agents.agent import Agent, with_sub_agents
from stepfleet.orchestrator.errors import AgentException, StoreError
from stepfleet.orchestrator.protocol.claim import Refusal, Refused, Work
from stepfleet.orchestrator.settings.settings import Settings
from stepfleet.orchestrator.store.fleet.quarantine import keep_aside
from stepfleet.orchestrator.store.store import Store, open_store
from stepfleet.worker.agents.local import check_sources
from stepfleet.worker.engine.bridge import PerLoop, end_tasks, home_loop
from stepfleet.worker.engine.time_limits import TimeLimits
from stepfleet.worker.events.delivery import EventDelivery
from stepfleet.worker.events.subscribers import deliveries
from stepfleet.worker.leases.lease import Leases
from stepfleet.worker.leases.renewal import Renewal
from stepfleet.worker.ports import Ports
from stepfleet.worker.runtime.admission.gate import Gate
from stepfleet.worker.runtime.admission.ticker import Ticker
from stepfleet.worker.runtime.background import Ends, background_tasks, report
from stepfleet.worker.runtime.circuits import CircuitBreaker
from stepfleet.worker.runtime.compose import Collaborators
from stepfleet.worker.runtime.connect import child_name, connect, disconnect, process_name
from stepfleet.worker.runtime.crash_points import Visit, crash_points, unharmed
from stepfleet.worker.runtime.isolation.isolation import Isolation
from stepfleet.worker.runtime.isolation.processes import IsolatedProcesses
from stepfleet.worker.runtime.shutdown import Notice, Stopping
from stepfleet.worker.runtime.waiting.links import LinkedRuns
from stepfleet.worker.step import Report, run_work
from stepfleet.worker.telemetry.instrumentation import import_exporters
from stepfleet.worker.toolbox.threads import ToolThreads

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.2
"""So often a worker that gets ready looks whether it is to stop."""
LAST_SECONDS = 1.0
"""How long a stopping worker repeats calls to a Redis that is away: the bound is for its end."""


class LoopServices:
    """The collaborators of the steps that run in one event loop.

    `isolates`: suspects are executed in isolated processes. `consumes`: this process takes tasks
    from the queues; one that does not only renews its leases beside its steps. `threads` are for
    tools, in place of the settings' own.
    """

    def __init__(  # noqa: PLR0913 - what a process brings, and how it differs
        self,
        settings: Settings,
        agents: Iterable[Agent],
        app: Celery,
        leases: Leases,
        crash: Visit = unharmed,
        *,
        isolates: bool = False,
        consumes: bool = True,
        threads: ToolThreads | None = None,
    ) -> None:
        self._settings = settings
        leases.worker = leases.worker or process_name()
        leases.slots = leases.slots or (lambda: settings.slots)
        self._patience = settings.patience
        self._agents = list(with_sub_agents(agents).values())
        self._isolates = isolates
        self._consumes = consumes
        self._app = app
        self._leases = leases
        self._crash = crash
        self._shared = Collaborators(settings, self._agents, leases.worker, threads)
        self._deliveries: list[EventDelivery] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._opening: asyncio.Task[Ports] | None = None
        self._store: Store | None = None
        self._has_ended = False
        self._isolation: Isolation | None = None
        self._gate: Gate | None = None
        self._batch_ended = asyncio.Event()
        self._linked: LinkedRuns | None = None
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
    def store(self) -> Store:
        """The open store. Raises `StoreError` before the first `ports()`."""
        if self._store is None:
            msg = "the store is not open yet"
            raise StoreError(msg)
        return self._store

    async def check(self, run_id: str, batch_id: str = "") -> None:
        """Renew what is held here of a run, or of a batch, and apply what the store answers.

        Where the batch has ended, those that follow it begin.
        """
        await self.ports()
        if batch_id:
            self._batch_ended.set()
        await self._renewal.renew(run_id, batch_id)

    async def run(self, work: Work, ports: Ports | None = None) -> Report:
        """Do the step, paced among the others of this loop, or make the tool call."""
        ports = ports or await self.ports()
        if work.index is not None:
            return await run_work(work, ports, self._leases)
        with ports.pacing:
            report = await run_work(work, ports, self._leases)
        if report.owes and self._linked:
            waits = report.refusal is not None and report.refusal.why is Refused.EARLY
            linked = self._linked.dependents.attend if waits else self._linked.settle
            await linked(work.run_id)
        if report.is_last:
            self._batch_ended.set()
        return report

    def be_patient(self, seconds: float) -> None:
        """Let calls to the store, also those that wait already, wait so long for it."""
        self._patience = seconds
        if self._store:
            self._store.connection.patience = seconds

    async def put_aside(self, entry: bytes) -> None:
        """Keep a message that may not be acted on, for people. Raises `StoreError`."""
        await self.ports()
        await keep_aside(self.store.connection, entry, self.store.keys)

    async def settle(self) -> None:
        """Give subscribers and readers of text a few seconds to receive what is left."""
        await self._shared.settle()

    async def aclose(self) -> None:
        """End the background tasks and disconnect."""
        self._has_ended = True
        self.be_patient(min(self._patience, LAST_SECONDS))
        if self._opening:
            await end_tasks([self._opening])
        await end_tasks(self._tasks)
        if self._isolation:
            await self._isolation.aclose()
        await self._leases.settle(LAST_SECONDS)  # claims whose reply nobody waited for go back
        if self._gate:
            await self._gate.aclose()
        await self._shared.aclose()
        for delivery in self._deliveries:
            await delivery.aclose()
        if self._store:
            await disconnect(self._store)

    async def _open(self) -> Ports:
        opened = self._store = await open_store(
            self._settings, self._app, worker=self._leases.worker, crash=self._crash
        )
        opened.connection.patience = self._patience
        try:
            return await self._set_up(opened)
        except BaseException:
            # Nothing is left behind: the next try opens another.
            await end_tasks(self._tasks)
            for delivery in self._deliveries:
                await delivery.aclose()
            self._tasks, self._deliveries, self._store = [], [], None
            await opened.aclose()
            raise

    async def _set_up(self, opened: Store) -> Ports:
        leases, app, settings = self._leases, self._app, self._settings
        await connect(opened, self._agents)
        self._renewal = Renewal.over(opened, leases, app if self._consumes else None)
        isolation = None
        if self._consumes:
            self._deliveries = await deliveries(opened, process_name(), random.random)
            processes = None
            if self._isolates:
                processes = IsolatedProcesses(draining=lambda: leases.draining)
            renew, limit, grace = self._renewal.once, settings.poison_limit, settings.grace
            isolation = self._isolation = Isolation(limit, grace, renew, opened.marks, processes)
        self._linked = LinkedRuns(opened)
        gate = self._gate = Gate(opened, f"{process_name()}:{id(self):x}")
        ticker = Ticker(opened, gate, leases)
        await ticker.prepare()
        circuits = None
        if self._consumes and settings.circuit_after:
            circuits = CircuitBreaker(opened.circuits, settings.circuit_after)
        ports = self._shared.compose(opened, gate, isolation, circuits)
        renewals = asyncio.create_task(self._renewal.watch(), name="stepfleet-leases")
        ticks = asyncio.create_task(ticker.watch(), name="stepfleet-limits")
        self._tasks = [renewals, ticks]
        if self._consumes:
            await report(opened, self._agents, leases, app)
            instrumentation = self._shared.instrumentation
            self._tasks += background_tasks(
                opened,
                self._agents,
                leases,
                app,
                self._crash,
                instrumentation,
                Ends(self._linked.settle, self._batch_ended),
            )
        self._tasks += [asyncio.create_task(one.watch()) for one in self._deliveries]
        if circuits:
            watch = circuits.watch(settings.rescue_interval)
            self._tasks.append(asyncio.create_task(watch, name="stepfleet-circuits"))
        return ports


class Services:
    """The services of a worker process, in whichever loop its pool runs steps.

    `leave` replaces the end by force of a process that does not end in time.
    """

    def __init__(
        self,
        settings: Settings,
        agents: Iterable[Agent],
        app: Celery,
        *,
        isolates: bool = False,
        leave: Callable[[float], None] | None = None,
    ) -> None:
        agents = tuple(with_sub_agents(agents).values())
        check_sources(agents)
        import_exporters(settings)
        self._settings = settings
        self.leases = Leases(time.monotonic)
        self.crash = crash_points(os.environ)
        self.stopping = Stopping(settings.drain, leave)
        self.limits = TimeLimits()
        self._isolates = isolates
        self._known = Notice()
        self._worker: Any = None
        self._made: LoopServices | None = None

        def make() -> LoopServices:
            if self._worker is not None:
                self._name_leases()
            made = LoopServices(settings, agents, app, self.leases, self.crash, isolates=isolates)
            # A model's answer is worth waiting for Redis, however long that takes.
            made.be_patient(0.0 if self.leases.draining else math.inf)
            self._made = made
            return made

        self._loop: Callable[[], LoopServices] = PerLoop(make, LoopServices.aclose)

    @property
    def node(self) -> str:
        """The name of Celery's worker; empty before it is known."""
        return str(getattr(self._worker, "hostname", ""))

    def belong_to(self, worker: Any) -> None:
        """Note Celery's `worker`: its name is that of what is held here, its pool has the slots."""
        self._worker = worker

    def _name_leases(self) -> None:
        if self._isolates:
            self.leases.worker = self.node
            self.leases.slots = lambda: int(self._worker.pool.num_processes)
        else:  # a child of a pool: its siblings share the node, and it does one thing at a time
            self.leases.worker = child_name(self.node, os.getpid())
            self.leases.slots = lambda: 1

    async def run(self, work: Work) -> Report:
        """Do the step, or make the tool call; a stopping worker refuses."""
        if work.index is None:
            self.crash("message-popped")
        if refusal := await self._refusal(work):
            return Report(work, refusal=refusal)
        try:
            return await self._loop().run(work)
        except StoreError:
            if not self.leases.draining or work.index is not None:
                raise
            return Report(work, refusal=Refusal(Refused.DRAINING))

    async def _refusal(self, work: Work) -> Refusal | None:
        if self.leases.draining:
            return Refusal(Refused.DRAINING)
        if await self.leases.keeps(work):
            await self._loop().check(work.run_id)
            return Refusal(Refused.LEASED, "by this process")
        return None

    async def put_aside(self, entry: bytes) -> None:
        """Keep a message that may not be acted on, for people. Raises `StoreError`."""
        await self._loop().put_aside(entry)

    def open(self) -> None:
        """Get ready, before the pool forks children."""
        self.stopping.open()
        self._known.open()

    def start(self) -> None:
        """Connect and start the background tasks in this process's loop. Safe to call again."""
        home_loop().submit(lambda: asyncio.ensure_future(self._started()))

    def wait_until_known(self, seconds: float) -> None:
        """Wait, at most so long, until clients can submit to the agents by name.

        Those of a pool's children, too: the first of them is enough.
        """
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.stopping.has_begun:
            if self._known.comes_within(LOOK_SECONDS):
                return

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
        """Interrupt what is held here of a run, or of a batch, if the store says so."""
        if batch_id or self.leases.of(run_id):
            home_loop().submit(lambda: asyncio.ensure_future(self._loop().check(run_id, batch_id)))

    def _be_patient(self, seconds: float) -> None:
        if self._made is not None:
            self._made.be_patient(min(seconds, self._settings.patience))

    async def _started(self) -> None:
        self.stopping.connect(self.drain, self.hand_back)
        logged = ""
        while True:
            try:
                await self._loop().ports()
            except (AgentException, RedisError, OSError) as error:
                if str(error) != logged:
                    logged = str(error)
                    log.warning("waiting for the store: %s", error)
                await asyncio.sleep(1)
            else:
                if not self._known.comes_within(0):  # a sibling may have given it
                    self._known.give()
                return
