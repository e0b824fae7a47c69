"""A worker process: opens a worker in whichever loop its pool runs steps, and ends it in stages."""

import asyncio
import logging
import math
import os
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from typing import Any

from celery import Celery
from redis.exceptions import RedisError

from stepfleet.orchestrator.agents.agent import Agent, with_sub_agents
from stepfleet.orchestrator.errors import AgentException, StoreError
from stepfleet.orchestrator.protocol.claim import Refusal, Refused, Work
from stepfleet.orchestrator.settings.settings import Settings
from stepfleet.orchestrator.store.fleet.quarantine import keep_aside
from stepfleet.orchestrator.store.store import Store
from stepfleet.worker.agents.local import check_sources
from stepfleet.worker.engine.bridge import PerLoop, end_tasks, home_loop
from stepfleet.worker.engine.time_limits import TimeLimits
from stepfleet.worker.leases.lease import Leases
from stepfleet.worker.runtime.child_deaths import child_name
from stepfleet.worker.runtime.crash_points import crash_points
from stepfleet.worker.runtime.shutdown import Notice, Stopping
from stepfleet.worker.runtime.upkeep import process_name
from stepfleet.worker.runtime.worker import LAST_SECONDS, Worker
from stepfleet.worker.step import Report
from stepfleet.worker.telemetry.instrumentation import (
    Instrumentation,
    import_exporters,
    instrument,
)

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.2
"""So often a worker that gets ready looks whether it is to stop."""


class Opening:
    """The worker of one event loop, opened for whoever needs it first, again after a failure.

    `open_worker` is `Worker.open` without the arguments that are given here. Calls to the store
    wait so many seconds for it as `be_patient` has said last; at first as long as it takes, since
    a model's answer is worth that.
    """

    def __init__(
        self,
        open_worker: Callable[..., AbstractAsyncContextManager[Worker]],
        telemetry: Instrumentation,
        patience: float = math.inf,
    ) -> None:
        self._open = partial(open_worker, telemetry=telemetry, connected=self._connected)
        self._patience = patience
        self._stack = AsyncExitStack()
        self._stack.push_async_callback(telemetry.aclose)
        self._opening: asyncio.Task[Worker] | None = None
        self._store: Store | None = None
        self._has_ended = False

    async def worker(self) -> Worker:
        """Return the worker; the first call connects. Raises `StoreError`."""
        if self._opening is None or (self._opening.done() and self._opening.exception()):
            if self._has_ended:
                msg = "this worker is ending and connects no more"
                raise StoreError(msg)
            opened = self._stack.enter_async_context(self._open())
            self._opening = asyncio.create_task(opened)
        if self._opening.done():
            return self._opening.result()
        return await asyncio.shield(self._opening)

    def be_patient(self, seconds: float) -> None:
        """Let calls to the store, also those that wait already, wait so long for it."""
        self._patience = seconds
        if self._store is not None:
            self._store.connection.patience = seconds

    async def aclose(self) -> None:
        """Close the worker; one that is being opened is not waited for."""
        self._has_ended = True
        if self._opening:
            await end_tasks([self._opening])
        await self._stack.aclose()

    def _connected(self, store: Store) -> None:
        self._store = store
        store.connection.patience = self._patience


class WorkerProcess:
    """Does steps in whichever loop the pool runs them, and ends in stages.

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
        self._agents = tuple(with_sub_agents(agents).values())
        check_sources(self._agents)
        import_exporters(settings)
        self._settings = settings
        self._app = app
        self.leases = Leases(time.monotonic)
        self.crash = crash_points(os.environ)
        self.stopping = Stopping(settings.drain, leave)
        self.limits = TimeLimits()
        self._isolates = isolates
        self._known = Notice()
        self._celery: Any = None
        self._made: Opening | None = None
        self._loop: Callable[[], Opening] = PerLoop(self._make, Opening.aclose)

    @property
    def node(self) -> str:
        """The name of Celery's worker; empty before it is known."""
        return str(getattr(self._celery, "hostname", ""))

    def belong_to(self, worker: Any) -> None:
        """Note Celery's `worker`: its name is that of what is held here, its pool has the slots."""
        self._celery = worker

    def _make(self) -> Opening:
        name, slots = "", None
        if self._celery is not None and self._isolates:
            name, slots = self.node, lambda: int(self._celery.pool.num_processes)
        elif self._celery is not None:
            # A child of a pool: its siblings share the node, and it does one thing at a time.
            name, slots = child_name(self.node, os.getpid()), lambda: 1
        opening = partial(
            Worker.open,
            *(self._settings, self._agents, self._app, self.leases),
            name=name,
            slots=slots,
            crash=self.crash,
            isolates=self._isolates,
        )
        telemetry = instrument(self._settings, name or process_name(), serves=True)
        patience = 0.0 if self.leases.draining else math.inf
        self._made = Opening(opening, telemetry, patience)
        return self._made

    async def run(self, work: Work) -> Report:
        """Do the step, or make the tool call; a stopping worker refuses."""
        if work.index is None:
            self.crash("message-popped")
        if refusal := await self._refusal(work):
            return Report(work, refusal=refusal)
        try:
            return await (await self._loop().worker()).run(work)
        except StoreError:
            if not self.leases.draining or work.index is not None:
                raise
            return Report(work, refusal=Refusal(Refused.DRAINING))

    async def _refusal(self, work: Work) -> Refusal | None:
        if self.leases.draining:
            return Refusal(Refused.DRAINING)
        if await self.leases.keeps(work):
            await self._check(work.run_id)
            return Refusal(Refused.LEASED, "by this process")
        return None

    async def put_aside(self, entry: bytes) -> None:
        """Keep a message that may not be acted on, for people. Raises `StoreError`."""
        store = (await self._loop().worker()).store
        await keep_aside(store.connection, entry, store.keys)

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
            home_loop().submit(lambda: asyncio.ensure_future(self._check(run_id, batch_id)))

    async def _check(self, run_id: str, batch_id: str = "") -> None:
        await (await self._loop().worker()).check(run_id, batch_id)

    def _be_patient(self, seconds: float) -> None:
        if self._made is not None:
            self._made.be_patient(min(seconds, self._settings.patience))

    async def _started(self) -> None:
        self.stopping.connect(self.drain, self.hand_back)
        logged = ""
        while True:
            try:
                await self._loop().worker()
            except (AgentException, RedisError, OSError) as error:
                if str(error) != logged:
                    logged = str(error)
                    log.warning("waiting for the store: %s", error)
                await asyncio.sleep(1)
            else:
                if not self._known.comes_within(0):  # a sibling may have given it
                    self._known.give()
                return
