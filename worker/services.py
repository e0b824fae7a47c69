"""What a worker process is made of: put together once per event loop, from the settings.

Starts with the process: leases are renewed and overdue runs rescued also while no task comes.
"""

import asyncio
import logging
import os
import random
import secrets
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

import orjson
from celery import Celery
from redis.exceptions import RedisError

from stepfleet.orchestrator.agent import Agent
from stepfleet.orchestrator.errors import AgentException, StoreError
from stepfleet.orchestrator.pricing import cost_of
from stepfleet.orchestrator.protocol.claim import Refusal, Refused, StepHint
from stepfleet.orchestrator.settings import Settings
from stepfleet.orchestrator.store import keys
from stepfleet.orchestrator.store.fleet_facts import forget_workers
from stepfleet.orchestrator.store.opening import OpenStore, open_store
from stepfleet.orchestrator.store.soundness import server_info, warnings
from stepfleet.orchestrator.store.steps import Held, StepStore, Terms
from stepfleet.worker.agents import LocalAgents
from stepfleet.worker.bridge import PerLoop, home_loop
from stepfleet.worker.crash import Visit, crash_points, unharmed
from stepfleet.worker.leases import Lease, Leases, heed
from stepfleet.worker.models import Models
from stepfleet.worker.ports import Ports
from stepfleet.worker.rescuer import Rescuer
from stepfleet.worker.step import StepReport, run_step
from stepfleet.worker.toolbox.box import LocalToolbox

log = logging.getLogger(__name__)

RENEWALS_PER_LEASE = 3


class LoopServices:
    """The collaborators of the steps that run in one event loop."""

    def __init__(
        self,
        settings: Settings,
        agents: Iterable[Agent],
        app: Celery,
        leases: Leases,
        crash: Visit = unharmed,
    ) -> None:
        self._settings = settings
        self._agents = list(agents)
        self._app = app
        self._leases = leases
        self._crash = crash
        self._models = Models(connections=0)
        self._toolbox = LocalToolbox(settings.tool_threads)
        self._opening: asyncio.Task[Ports] | None = None
        self._watches: list[asyncio.Task[None]] = []
        self._store: OpenStore | None = None

    async def ports(self) -> Ports:
        """Return the ports of steps; the first call connects. Raises `StoreError`."""
        if self._opening is None or (self._opening.done() and self._opening.exception()):
            self._opening = asyncio.create_task(self._open())
        return await asyncio.shield(self._opening)

    @property
    def store(self) -> OpenStore:
        """The open store. Raises `StoreError` before the first `ports()`."""
        if self._store is None:
            msg = "the store is not open yet"
            raise StoreError(msg)
        return self._store

    async def check(self, run_id: str) -> None:
        """Ask the store what is wanted of a run that is held here, and heed it."""
        lease = self._leases.find(run_id)
        ports = await self.ports()
        if lease is not None:
            heed(lease, await ports.store.journal(lease.claim, lease.seconds))

    async def aclose(self) -> None:
        """End the watches and disconnect."""
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        await self._models.aclose()
        if self._store:
            with suppress(AgentException):
                await self._store.connection.execute("HDEL", keys.WORKERS, worker_name())
            await self._store.aclose()

    async def _open(self) -> Ports:
        settings = self._settings
        opened = self._store = await open_store(settings, self._app)
        for warning in warnings(await server_info(opened.connection)):
            log.warning(warning)
        terms = Terms(settings.lease, settings.grace, settings.retention, worker_name())
        store = StepStore(
            opened.connection, opened.keys, opened.configs, opened.dispatch, terms, self._crash
        )
        for agent in self._agents:
            await opened.configs.announce(agent.config)
        await forget_workers(opened)
        rescuer = Rescuer(
            opened.connection,
            opened.keys,
            opened.dispatch,
            grace=settings.grace,
            interval=settings.rescue_interval,
            long_queue=settings.slots,
            jitter=random.random,
        )
        self._watches = [
            asyncio.create_task(rescuer.watch(self._crash), name="stepfleet-rescuer"),
            asyncio.create_task(self._renew(store), name="stepfleet-leases"),
            asyncio.create_task(self._report(opened), name="stepfleet-report"),
        ]
        return Ports(
            store=store,
            agent=LocalAgents(self._agents, self._models).find,
            toolbox=self._toolbox,
            cost=cost_of,
            elapsed=time.monotonic,
            jitter=random.random,
            token=lambda: secrets.token_hex(8),
            crash=self._crash,
            worker=worker_name(),
            poison_limit=settings.poison_limit,
        )

    async def _renew(self, store: StepStore) -> None:
        async def once(lease: Lease) -> Held:
            return await store.journal(lease.claim, lease.seconds)

        while True:
            await asyncio.sleep(self._settings.lease / RENEWALS_PER_LEASE)
            await self._leases.renew(once)

    async def _report(self, opened: OpenStore) -> None:
        """Tell who is there, for people: nothing depends on it."""
        while True:
            seen = {
                "held": len(self._leases),
                "slots": self._settings.slots,
                "agents": sorted(agent.name for agent in self._agents),
            }
            with suppress(AgentException, RedisError):
                seen["seen"] = (await opened.connection.now()).timestamp()
                shown = orjson.dumps(seen).decode()
                await opened.connection.execute("HSET", keys.WORKERS, worker_name(), shown)
            await asyncio.sleep(self._settings.lease / RENEWALS_PER_LEASE)


class Services:
    """The services of a worker process, in whichever loop its pool runs steps."""

    def __init__(self, settings: Settings, agents: Iterable[Agent], app: Celery) -> None:
        self._settings = settings
        self.leases = Leases(time.monotonic)
        self.crash = crash_points(os.environ)
        self._loop: Callable[[], LoopServices] = PerLoop(
            lambda: LoopServices(settings, agents, app, self.leases, self.crash),
            LoopServices.aclose,
        )

    async def run_step(self, hint: StepHint) -> StepReport:
        """Do the step that `hint` names; a stopping worker refuses."""
        self.crash("message-popped")
        if self.leases.draining:
            return StepReport(hint, refusal=Refusal(Refused.DRAINING))
        return await run_step(hint, await self._loop().ports(), self.leases)

    def start(self) -> None:
        """Connect and start the watches in this process's loop. Safe to call again."""
        home_loop().submit(lambda: asyncio.ensure_future(self._started()))

    def drain(self, *, at_once: bool = False) -> None:
        """Take no new steps; hand back what is still held at once, or after the drain time."""
        self.leases.draining = True
        seconds = 0.0 if at_once else self._settings.drain
        home_loop().submit(
            lambda: asyncio.get_running_loop().call_later(seconds, self.leases.hand_back)
        )

    def interrupt(self, run_id: str) -> None:
        """Break off the attempt at a run's step, if it is held here and the store says so."""
        if self.leases.find(run_id) is not None:
            home_loop().submit(lambda: asyncio.ensure_future(self._loop().check(run_id)))

    async def _started(self) -> None:
        while True:
            try:
                await self._loop().ports()
            except (AgentException, RedisError, OSError) as error:
                log.warning("waiting for the store: %s", error)
                await asyncio.sleep(1)
            else:
                return


def worker_name() -> str:
    """Return this process's name: host and process id."""
    return f"{socket.gethostname()}:{os.getpid()}"
