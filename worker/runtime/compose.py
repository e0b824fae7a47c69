"""Composes the ports of the steps of one event loop, from settings, agents and a store."""

import asyncio
import random
import secrets
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence

from stepfleet.orchestrator.agents.agent import Agent
from stepfleet.orchestrator.agents.config import AgentConfig
from stepfleet.orchestrator.memory.tokens import TokenCounters
from stepfleet.orchestrator.models.pricing import Cost, Prices, RecentPrices, stated_cost
from stepfleet.orchestrator.models.pricing.prices import address_of
from stepfleet.orchestrator.protocol.claim import Claim
from stepfleet.orchestrator.records.calls.answers import Awaited
from stepfleet.orchestrator.records.errors import ErrorInfo
from stepfleet.orchestrator.records.usage import UsageStats
from stepfleet.orchestrator.settings.settings import Settings
from stepfleet.orchestrator.store.store import Store
from stepfleet.worker.agents.local import LocalAgents, Sources, sources_of
from stepfleet.worker.agents.response_cache import ResponseCache
from stepfleet.worker.agents.streaming import Streaming
from stepfleet.worker.events.subscribers import SubscriberObserver, SubscriberQueue
from stepfleet.worker.events.text_chunks import ChunkSender
from stepfleet.worker.ports import OpenCircuits, Ports
from stepfleet.worker.runtime.admission.admitted_steps import AdmittedSteps
from stepfleet.worker.runtime.admission.gate import Gate
from stepfleet.worker.runtime.admission.spending import price_by
from stepfleet.worker.runtime.isolation.isolation import Isolation
from stepfleet.worker.runtime.waiting.attending import asked_people
from stepfleet.worker.runtime.waiting.child_runs import ChildRuns
from stepfleet.worker.telemetry import step_logger
from stepfleet.worker.telemetry.instrumentation import instrument
from stepfleet.worker.toolbox.threads import ToolThreads

SETTLE_SECONDS = 5.0


class Collaborators:
    """What the steps of one event loop share, whichever store they are connected to."""

    def __init__(
        self,
        settings: Settings,
        agents: Sequence[Agent],
        worker: str,
        threads: ToolThreads | None = None,
    ) -> None:
        self.instrumentation = instrument(settings, worker)
        self.listening = SubscriberQueue()
        self._agents = agents
        self._worker = worker
        self._models = self.instrumentation.models()
        self._toolbox = self.instrumentation.toolbox(threads or ToolThreads(settings.tool_threads))
        self._counters = TokenCounters()
        self._sources: Sources | None = None
        self._chunks: ChunkSender | None = None
        self._cache: ResponseCache | None = None

    def compose(
        self,
        opened: Store,
        gate: Gate,
        isolation: Isolation | None,
        circuits: OpenCircuits | None = None,
    ) -> Ports:
        """Return the ports of steps over a store; `gate` gives leave to their model calls."""
        settings, store = opened.settings, opened.steps
        self._sources = self._sources or sources_of(self._agents)
        self._chunks = ChunkSender(opened.chunks, opened.connection.now)
        streaming = Streaming(self._chunks, self.listening)
        subscribers = {one.name: one.subscribers for one in self._agents if one.subscribers}
        listener = (SubscriberObserver(subscribers, self.listening),) if subscribers else ()
        logger = step_logger(as_json=settings.log_format == "json")
        cost, store.has_price = _prices([one.config for one in self._agents])
        self._models.watch = gate
        children = ChildRuns(opened)
        cache = self._cache = ResponseCache(opened.cache, cost)
        people = asked_people(store.calls)
        steps = AdmittedSteps(store, gate, price_by(cost))
        return Ports(
            store=steps,
            admit=steps.admit,
            calls=store.calls,
            agent=LocalAgents(self._agents, self._models, streaming, self._sources, cache).find,
            toolbox=self._toolbox,
            cost=cost,
            jitter=random.random,
            token=lambda: secrets.token_hex(8),
            crash=opened.crash,
            worker=self._worker,
            poison_limit=settings.poison_limit,
            patience=settings.grace,
            tokens=self._counters.of,
            isolation=isolation.takes if isolation else None,
            observers=(*listener, *logger, *self.instrumentation.observers()),
            hold=_holding(opened) if settings.hold_after else None,
            circuits=circuits,
            outage_patience=settings.outage_patience,
            stop_run=children.linked.stop,
            attend={
                Awaited.RUN: children.attend,
                Awaited.APPROVAL: people,
                Awaited.PERSON: people,
            },
            successor=_successor(opened, self._agents),
        )

    async def settle(self) -> None:
        """Give subscribers and readers of text a few seconds to receive what is left."""
        beside = (self.listening, self._chunks, self._cache)
        await asyncio.gather(*(one.settle(SETTLE_SECONDS) for one in beside if one))

    async def aclose(self) -> None:
        """Close them all."""
        await self.settle()
        await self.listening.aclose()
        await self.instrumentation.aclose()
        await self._models.aclose()
        if self._sources:
            await self._sources.aclose()


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


def _successor(opened: Store, agents: Sequence[Agent]) -> Callable[[str], Awaitable[AgentConfig]]:
    """Return what finds an agent that goes on with a run: this worker's own, or one announced."""
    here = {one.name: one.config for one in agents}

    async def successor(name: str) -> AgentConfig:
        config = here.get(name) or await opened.configs.named(name)
        await opened.configs.save(config)
        return config

    return successor


def _holding(opened: Store) -> Callable[[Claim, ErrorInfo], Awaitable[int]]:
    """Return what holds batches whose runs end with equal errors."""
    most = opened.settings.hold_after

    async def hold(claim: Claim, error: ErrorInfo) -> int:
        batch_id = claim.batch_id or ""
        return await opened.requests.hold(batch_id, error, claim.config.model, claim.token, most)

    return hold
