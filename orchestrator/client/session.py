"""What a client of a fleet is made of: put together once, from an open store."""

import asyncio
import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from celery import Celery
from pydantic import SecretStr

from stepfleet.orchestrator.agents.agent import Agent
from stepfleet.orchestrator.agents.config import AgentConfig
from stepfleet.orchestrator.batches.openai_format import PLAIN_AGENT
from stepfleet.orchestrator.batches.submit import BatchSubmission
from stepfleet.orchestrator.client.batch_retry import BatchRetry
from stepfleet.orchestrator.client.control import RunControl
from stepfleet.orchestrator.client.follow import Following
from stepfleet.orchestrator.client.watch import RunWatch
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.settings.settings import Settings
from stepfleet.orchestrator.store.batches.batches import Batches
from stepfleet.orchestrator.store.batches.requests import BatchRequests
from stepfleet.orchestrator.store.embedded import EmbeddedRedis
from stepfleet.orchestrator.store.embedded.folder import Folder
from stepfleet.orchestrator.store.fleet_overview import WorkerSeen, workers
from stepfleet.orchestrator.store.opening.brokers import forget_pools
from stepfleet.orchestrator.store.opening.opening import OpenStore, client_app, open_store
from stepfleet.orchestrator.store.runs.control import Control
from stepfleet.orchestrator.store.runs.import_run import RunImport
from stepfleet.orchestrator.store.runs.reading import Runs
from stepfleet.orchestrator.store.runs.snapshots import Snapshots
from stepfleet.orchestrator.store.runs.submission import Submission


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
    run_import: RunImport
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
            run_import=RunImport(
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


DATA_FOLDER = Path(".stepfleet")
_LEFT: list[object] = []
"""Connections of a parent process, which must not be collected here: that would close them."""


class Session:
    """One connection, in the loop of its first use; all rooms of a fleet share it.

    Without a Redis in the settings it joins the private server of the folder `.stepfleet`, where
    there is one. `brings` names agents whose workers the caller starts.
    """

    def __init__(self, settings: Settings, brings: Collection[str] = ()) -> None:
        self._settings = settings
        self._brings = frozenset(brings)
        self._opening: asyncio.Task[Client] | None = None
        self._private: EmbeddedRedis | None = None
        self._process = os.getpid()

    async def aclose(self) -> None:
        """Disconnect, and leave the private server if there is one."""
        opening, self._opening = self._opening, None
        if opening is not None:
            await asyncio.wait([opening])
            if not opening.cancelled() and opening.exception() is None:
                await opening.result().aclose()
        private, self._private = self._private, None
        if private is not None:
            await asyncio.to_thread(private.stop)

    def forget(self) -> object:
        """Leave the connection to the process that made it, and return it; for a forked child.

        The next use connects anew. Nothing is closed: sockets and server are the parent's.
        """
        left = (self._opening, self._private)
        opening = self._opening
        if opening and opening.done() and not (opening.cancelled() or opening.exception()):
            forget_pools(opening.result().app)
        self._opening, self._private, self._process = None, None, os.getpid()
        return left

    async def open(self) -> Client:
        """Return the collaborators, connected. Raises `StoreError` or `ConfigurationError`."""
        if self._process != os.getpid():
            _LEFT.append(self.forget())
        if self._opening is None or (self._opening.done() and self._opening.exception()):
            self._opening = asyncio.create_task(self._connect())
        return await asyncio.shield(self._opening)

    async def _connect(self) -> Client:
        settings = self._settings
        if settings.redis_url is None:
            self._private = await asyncio.to_thread(_private_server)
        if self._private is None:
            return await Client.open(settings, self._brings)
        url = SecretStr(self._private.url)
        try:
            found = settings.model_copy(update={"redis_url": url})
            return await Client.open(found, self._brings)
        except BaseException:
            private, self._private = self._private, None
            await asyncio.to_thread(private.stop)
            raise


def _private_server() -> EmbeddedRedis | None:
    if not Folder(DATA_FOLDER.absolute()).has_data:
        return None
    return EmbeddedRedis.start(DATA_FOLDER, brief=True)
