"""The worker of one event loop: what its steps need, and what runs beside them, over one store."""

import asyncio
import logging
import random
import secrets
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from celery import Celery
from redis.exceptions import RedisError

from stepfleet.orchestrator.agents.agent import Agent, with_sub_agents
from stepfleet.orchestrator.agents.config import AgentConfig
from stepfleet.orchestrator.errors import AgentException
from stepfleet.orchestrator.memory.tokens import TokenCounters
from stepfleet.orchestrator.models.pricing import Cost, Prices, RecentPrices, stated_cost
from stepfleet.orchestrator.models.pricing.prices import address_of
from stepfleet.orchestrator.protocol.claim import Claim, Refused, Work
from stepfleet.orchestrator.records.calls.answers import Awaited
from stepfleet.orchestrator.records.errors import ErrorInfo
from stepfleet.orchestrator.records.usage import UsageStats
from stepfleet.orchestrator.settings.settings import Settings
from stepfleet.orchestrator.store import keys
from stepfleet.orchestrator.store.fleet.figures import recent_figures
from stepfleet.orchestrator.store.fleet.overview import forget_workers
from stepfleet.orchestrator.store.fleet.servers import server_info, warnings
from stepfleet.orchestrator.store.store import Store, open_store
from stepfleet.worker.agents.local import LocalAgents, sources_of
from stepfleet.worker.agents.response_cache import ResponseCache
from stepfleet.worker.agents.streaming import Streaming
from stepfleet.worker.engine.bridge import end_tasks
from stepfleet.worker.events.subscribers import SubscriberObserver, SubscriberQueue
from stepfleet.worker.events.text_chunks import ChunkSender
from stepfleet.worker.leases.lease import Leases
from stepfleet.worker.leases.renewal import RENEWALS_PER_LEASE, Renewal
from stepfleet.worker.ports import Ports
from stepfleet.worker.runtime.admission.admitted_steps import AdmittedSteps
from stepfleet.worker.runtime.admission.spending import price_by
from stepfleet.worker.runtime.attending import ChildRuns, asked_people
from stepfleet.worker.runtime.crash_points import Visit, unharmed
from stepfleet.worker.runtime.isolation import IsolatedProcesses, Isolation
from stepfleet.worker.runtime.upkeep import Upkeep, process_name, report, sign_off
from stepfleet.worker.step import Report, run_work
from stepfleet.worker.telemetry import step_logger
from stepfleet.worker.telemetry.instrumentation import Instrumentation, instrument
from stepfleet.worker.toolbox.box import LocalToolbox
from stepfleet.worker.toolbox.threads import ToolThreads

log = logging.getLogger(__name__)

SETTLE_SECONDS = 5.0
LAST_SECONDS = 1.0
"""How long a stopping worker repeats calls to a Redis that is away: the bound is for its end."""
CHANGE_SECONDS = 1.0
"""A worker that holds more or less than it has reported reports that so soon."""


@dataclass(eq=False)
class Worker:
    """Does the steps of one event loop: `async with Worker.open(settings, agents, app, leases)`.

    Its leases are renewed, and overdue runs rescued, also while no step comes. `ports` are those of
    the steps; `listening` makes the calls of subscribers.
    """

    upkeep: Upkeep
    agents: Sequence[Agent]
    app: Celery
    leases: Leases
    telemetry: Instrumentation
    slots: Callable[[], int]
    isolates: bool
    consumes: bool
    threads: ToolThreads | None

    def __post_init__(self) -> None:
        """Make what the steps need; nothing is sent yet."""
        self.store, self.gate = self.upkeep.store, self.upkeep.gate
        store, agents, leases, settings = self.store, self.agents, self.leases, self.store.settings
        self._linked = self.upkeep.linked
        self._children = ChildRuns(store, self._linked)
        self._renewal = Renewal.over(store, leases, self.app if self.consumes else None)
        self.models = self.telemetry.models(self.gate)
        self.sources = sources_of(agents)
        self.listening = SubscriberQueue()
        self._chunks = ChunkSender(store.chunks, store.connection.now)
        self.isolation: Isolation | None = None
        self._circuits = self.upkeep.circuits if self.consumes else None
        if self.consumes:
            processes = None
            if self.isolates:
                processes = IsolatedProcesses(store.marks, draining=lambda: leases.draining)
            limits, renew = (settings.poison_limit, settings.grace), self._renewal.once
            self.isolation = Isolation(*limits, renew, processes)
        cost, store.steps.has_price = _prices([one.config for one in agents])
        self._cache = ResponseCache(store.cache, cost)
        threads = self.threads or ToolThreads(settings.tool_threads)
        self.ports = self._compose(cost, self.telemetry.toolbox(threads))

    @classmethod
    @asynccontextmanager
    async def open(  # noqa: PLR0913 - what a process brings, and how it differs
        cls,
        settings: Settings,
        agents: Iterable[Agent],
        app: Celery,
        leases: Leases,
        *,
        name: str = "",
        slots: Callable[[], int] | None = None,
        crash: Visit = unharmed,
        isolates: bool = False,
        consumes: bool = True,
        threads: ToolThreads | None = None,
        telemetry: Instrumentation | None = None,
        connected: Callable[[Store], None] = lambda _: None,
    ) -> AsyncGenerator[Self]:
        """Connect, and begin what runs beside the steps. Raises `StoreError`.

        `name` is whose leases these are (default: the process), `slots` how many steps it can do.
        `isolates`: suspects are executed in isolated processes. `consumes`: this process takes
        tasks from the queues; one that does not only renews its leases beside its steps. `threads`
        are for tools, in place of the settings' own. A `telemetry` that is given stays open where
        opening fails. `connected` receives the store before anything waits for it.
        """
        agents, name = list(with_sub_agents(agents).values()), name or process_name()
        tasks: list[asyncio.Task[None]] = []
        shown = telemetry or instrument(settings, name)
        is_open = telemetry is None

        async def export() -> None:
            if is_open:  # else whoever gave it opens again
                await shown.aclose()

        async with AsyncExitStack() as stack:  # closed from the last to the first
            closing = stack.push_async_callback
            closing(export)
            store = await open_store(settings, app, worker=name, crash=crash)
            closing(store.aclose)
            connected(store)
            try:
                closing(sign_off, store, keys.WORKERS)
                await _announce(store, agents)
                slots, given = slots or (lambda: settings.slots), (isolates, consumes, threads)
                opening = Upkeep.open(store, leases, slots(), delivers=consumes)
                upkeep = await stack.enter_async_context(opening)
                worker = cls(upkeep, agents, app, leases, shown, slots, *given)
                if worker.sources:
                    closing(worker.sources.aclose)
                closing(worker.models.aclose)
                closing(export)  # before what may take long: the connections, a store that is away
                closing(worker.listening.aclose)
                closing(worker.settle)
                closing(worker.gate.aclose)
                closing(leases.settle, LAST_SECONDS)  # claims whose reply nobody waited for go back
                if worker.isolation:
                    closing(worker.isolation.aclose)
                closing(end_tasks, tasks)
                await upkeep.ticker.prepare()
                if consumes:
                    await worker.report()
                for watch, called in worker.watches():
                    tasks.append(asyncio.create_task(watch, name=called))
                is_open = True
                yield worker
            finally:
                store.connection.patience = min(store.connection.patience, LAST_SECONDS)

    async def run(self, work: Work, ports: Ports | None = None) -> Report:
        """Do the step, paced among the others of this loop, or make the tool call."""
        ports = ports or self.ports
        if work.index is not None:
            return await run_work(work, ports, self.leases)
        with ports.pacing:
            report = await run_work(work, ports, self.leases)
        if report.owes:
            waits = report.refusal is not None and report.refusal.why is Refused.EARLY
            linked = self._linked.dependents.attend if waits else self._linked.settle
            await linked(work.run_id)
        if report.is_last:
            self.upkeep.batch_ended.set()
        return report

    async def check(self, run_id: str, batch_id: str = "") -> None:
        """Renew what is held here of a run, or of a batch, and apply what the store answers.

        Where the batch has ended, those that follow it begin.
        """
        if batch_id:
            self.upkeep.batch_ended.set()
        await self._renewal.renew(run_id, batch_id)

    async def settle(self) -> None:
        """Give subscribers and readers of text a few seconds to receive what is left."""
        beside = (self.listening, self._chunks, self._cache)
        await asyncio.gather(*(one.settle(SETTLE_SECONDS) for one in beside))

    async def report(self) -> None:
        """Report that this worker lives, and what it holds. Raises `StoreError`."""
        agents, leases = self.agents, self.leases
        await report(
            self.store,
            keys.WORKERS,
            held=len(leases),
            slots=self.slots(),
            agents=sorted(agent.name for agent in agents),
            # Remote control may add queues later.
            queues=sorted(self.app.amqp.queues.consume_from),
            tool_queues=sorted({queue for agent in agents for queue in agent.queues}),
            stopping=leases.draining,
        )

    async def _keep_reported(self) -> None:
        """Report until cancelled; announce agents again after a failover."""
        store, leases = self.store, self.leases
        announced = store.connection.connects
        every = store.settings.lease / RENEWALS_PER_LEASE
        reported: object = None
        at = float("-inf")
        while True:
            held = len(leases), leases.draining
            if held != reported or time.monotonic() - at >= every:
                reported, at = held, time.monotonic()
                with suppress(AgentException, RedisError):
                    await self.report()
                    if announced != (connects := store.connection.connects):
                        for agent in self.agents:
                            await store.configs.restore(agent.config)
                        announced = connects
            await asyncio.sleep(min(every, CHANGE_SECONDS))

    def _compose(self, cost: Cost, toolbox: LocalToolbox) -> Ports:
        store, settings, agents = self.store, self.store.settings, self.agents
        streaming = Streaming(self._chunks, self.listening)
        subscribers = {one.name: one.subscribers for one in agents if one.subscribers}
        listener = (SubscriberObserver(subscribers, self.listening),) if subscribers else ()
        logger = step_logger(as_json=settings.log_format == "json")
        steps = AdmittedSteps(store.steps, self.gate, price_by(cost))
        children, people = self._children, asked_people(store.calls)
        return Ports(
            store=steps,
            admit=steps.admit,
            calls=store.calls,
            agent=LocalAgents(agents, self.models, streaming, self.sources, self._cache).find,
            toolbox=toolbox,
            cost=cost,
            jitter=random.random,
            token=lambda: secrets.token_hex(8),
            crash=store.crash,
            worker=store.worker,
            poison_limit=settings.poison_limit,
            patience=settings.grace,
            tokens=TokenCounters().of,
            isolation=self.isolation.takes if self.isolation else None,
            observers=(*listener, *logger, *self.telemetry.observers()),
            hold=self._hold if settings.hold_after else None,
            circuits=self._circuits,
            outage_patience=settings.outage_patience,
            stop_run=children.linked.stop,
            attend={
                Awaited.RUN: children.attend,
                Awaited.APPROVAL: people,
                Awaited.PERSON: people,
            },
            successor=self._successor,
        )

    async def _successor(self, name: str) -> AgentConfig:
        """Return an agent that goes on with a run: this worker's own, or one announced."""
        own = (one.config for one in self.agents if one.name == name)
        config = next(own, None) or await self.store.configs.named(name)
        await self.store.configs.save(config)
        return config

    async def _hold(self, claim: Claim, error: ErrorInfo) -> int:
        """Hold a batch whose runs end with equal errors."""
        most, given = self.store.settings.hold_after, (claim.config.model, claim.token)
        return await self.store.requests.hold(claim.batch_id or "", error, *given, most)

    def watches(self) -> Iterator[tuple[Coroutine[Any, Any, None], str | None]]:
        """Return what runs beside the steps until it is cancelled, each with a name."""
        telemetry, leases = self.telemetry, self.leases
        yield self._renewal.watch(), "stepfleet-leases"
        if not self.consumes:
            yield self.upkeep.ticker.watch(), "stepfleet-limits"
            return
        yield self._keep_reported(), "stepfleet-heartbeat"
        yield from self.upkeep.watches(telemetry.rescued)
        held = (lambda: len(leases) - leases.calls, lambda: leases.calls)
        for watch in telemetry.background(*held, partial(recent_figures, self.store)):
            yield watch, None


async def _announce(store: Store, agents: Iterable[Agent]) -> None:
    """Check the server, load scripts and announce agents. Raises `StoreError`."""
    for warning in warnings(await server_info(store.connection)):
        log.warning(warning)
    await store.steps.prepare()
    for agent in agents:
        await store.configs.announce(agent.config)
    await forget_workers(store)


def _prices(
    agents: Iterable[AgentConfig],
) -> tuple[Cost, Callable[[AgentConfig, str], bool]]:
    """Return what a model's call costs, and whether an agent's model has a price at all."""
    recent = RecentPrices()
    prices = recent.prices()
    if not all(_is_priced(one, prices) for one in agents):
        # It takes some tenths of a second: not in the first step's call.
        threading.Thread(target=prices.warm, daemon=True, name="prices").start()

    def cost(model: str, usage: UsageStats, tier: str = "", address: str = "") -> float:
        return recent.prices().cost_of(model, usage, tier, address)

    def has_price(config: AgentConfig, model: str) -> bool:
        names = (model, config.model)
        stated = stated_cost(config.pricing, names, UsageStats()) if config.pricing else None
        address = address_of(config.model, config.settings.base_url)
        return stated is not None or recent.prices().has(model, address)

    return cost, has_price


def _is_priced(config: AgentConfig, prices: Prices) -> bool:
    """Return whether the models of an agent have prices that need not be loaded."""
    return all(
        stated_cost(config.pricing, (model,), UsageStats()) is not None
        or prices.knows(model, address_of(model, config.settings.base_url))
        for model in config.models
    )
