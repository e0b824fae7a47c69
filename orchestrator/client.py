"""What a client of a fleet is made of: put together once, from an open store."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Self

from celery import Celery

from stepfleet.orchestrator.agent import Agent
from stepfleet.orchestrator.batch_retry import BatchRetry
from stepfleet.orchestrator.batch_submission import BatchSubmission
from stepfleet.orchestrator.config import AgentConfig
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.following import Following
from stepfleet.orchestrator.openai_batch import PLAIN_AGENT
from stepfleet.orchestrator.overview import WorkerSeen
from stepfleet.orchestrator.run_control import RunControl
from stepfleet.orchestrator.settings import Settings
from stepfleet.orchestrator.store.adoption import Adoption
from stepfleet.orchestrator.store.batch_requests import BatchRequests
from stepfleet.orchestrator.store.batches import Batches
from stepfleet.orchestrator.store.control import Control
from stepfleet.orchestrator.store.fleet_facts import workers
from stepfleet.orchestrator.store.opening import OpenStore, client_app, open_store
from stepfleet.orchestrator.store.reading import Runs
from stepfleet.orchestrator.store.snapshots import Snapshots
from stepfleet.orchestrator.store.submission import Submission
from stepfleet.orchestrator.watching import RunWatch


@dataclass(frozen=True, slots=True)
class Client:
    """The collaborators of a fleet's client, in one event loop."""

    store: OpenStore
    app: Celery
    runs: Runs
    control: RunControl
    batches: Batches
    requests: BatchRequests
    retries: BatchRetry
    submission: Submission
    batch_submission: BatchSubmission
    snapshots: Snapshots
    following: Following
    watch: RunWatch
    adoption: Adoption
    brings: frozenset[str] = frozenset()
    _accepted: set[str] = field(default_factory=set)

    @classmethod
    async def open(cls, settings: Settings, brings: frozenset[str] = frozenset()) -> Self:
        """Connect. Raises `StoreError` or `ConfigurationError` as `open_store` does."""
        app = client_app(settings)
        store = await open_store(settings, app)
        connection, keys, dispatch = store.connection, store.keys, store.dispatch
        runs = Runs(connection, keys, store.configs)
        control = Control(
            connection, keys, dispatch, grace=settings.grace, retention=settings.retention
        )
        batches = Batches(connection, keys, retention=settings.retention)
        run_control = RunControl(runs, control, app)
        watch = RunWatch(connection, keys, control.cancel_unread)
        submission = Submission(connection, keys, dispatch, grace=settings.grace)
        return cls(
            store=store,
            app=app,
            runs=runs,
            control=run_control,
            batches=batches,
            requests=BatchRequests(connection, keys, dispatch, batches, grace=settings.grace),
            retries=BatchRetry(store, batches, control, run_control),
            submission=submission,
            batch_submission=BatchSubmission(batches, store.configs, submission),
            snapshots=Snapshots(connection, keys, store.configs),
            following=Following(store, runs, watch),
            watch=watch,
            adoption=Adoption(
                connection, keys, dispatch, grace=settings.grace, retention=settings.retention
            ),
            brings=brings,
        )

    async def aclose(self) -> None:
        """Disconnect."""
        await self.watch.aclose()
        await self.store.aclose()
        self.app.close()

    async def config_of(self, agent: Agent | str) -> AgentConfig:
        """Return an agent's configuration. Raises `ConfigurationError` for an unknown name."""
        if isinstance(agent, Agent):
            return agent.config
        return await self.store.configs.named(agent)

    async def accept(self, configs: Sequence[AgentConfig]) -> None:
        """Raise `ConfigurationError` for an agent or tool that no running worker has.

        Where no worker runs, everything is accepted: they may start later. So is an agent whose
        workers the caller starts himself.
        """
        asked = [one for one in configs if one.name not in {PLAIN_AGENT, *self.brings}]
        if all(one.digest in self._accepted for one in asked):
            return
        there = [one for one in await workers(self.store) if one.alive]
        for config in asked if there else ():
            _check_agent(config, there)
            announced = await self.store.configs.named(config.name)
            _check_tools(config, announced)
            self._accepted.add(config.digest)


def _check_agent(config: AgentConfig, there: Iterable[WorkerSeen]) -> None:
    names = sorted({name for worker in there for name in worker.agents})
    if config.name not in names:
        known = ", ".join(names) or "none"
        msg = (
            f"no running worker has agent {config.name!r} (they have: {known}); "
            "start workers with --agents naming its module"
        )
        raise ConfigurationError(msg)


def _check_servers(config: AgentConfig, announced: AgentConfig) -> None:
    there = {server.name for server in announced.mcp_servers}
    missing = [one.name for one in config.mcp_servers if one.name not in there]
    if missing:
        msg = (
            f"agent {config.name!r} on the running workers has no MCP server {missing[0]!r}; "
            "restart them with the new code"
        )
        raise ConfigurationError(msg)


def _check_tools(config: AgentConfig, announced: AgentConfig) -> None:
    names = {tool.name for tool in announced.tools}
    missing = [tool.name for tool in config.tools if tool.name not in names]
    _check_servers(config, announced)
    if missing:
        msg = (
            f"agent {config.name!r} on the running workers has no tool {missing[0]!r} (it has: "
            f"{', '.join(sorted(names)) or 'none'}); restart them with the new code"
        )
        raise ConfigurationError(msg)
