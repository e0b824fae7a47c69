"""The collaborators of a client, composed from an open store, and the shared connection."""

import asyncio
import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Self

from celery import Celery
from pydantic import SecretStr

from stepfleet.orchestrator.agents.agent import Agent
from stepfleet.orchestrator.agents.config import AgentConfig
from stepfleet.orchestrator.batches.files.openai_format import PLAIN_AGENT
from stepfleet.orchestrator.batches.submit import BatchSubmission
from stepfleet.orchestrator.client.control import BatchRetry, RunControl
from stepfleet.orchestrator.client.local import LocalFleet
from stepfleet.orchestrator.client.watching.follow import RunFollower
from stepfleet.orchestrator.client.watching.standstill import (
    Quiet,
    Standstill,
    approvals_of_batch,
    approvals_of_runs,
    held_batch,
    held_runs,
)
from stepfleet.orchestrator.client.watching.watch import RunWatch
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.settings.settings import Settings
from stepfleet.orchestrator.store.dispatch import client_app, forget_pools
from stepfleet.orchestrator.store.embedded import EmbeddedRedis
from stepfleet.orchestrator.store.embedded.folder import Folder
from stepfleet.orchestrator.store.fleet.overview import needs_of, needs_of_batch, workers
from stepfleet.orchestrator.store.store import Store, open_store


class Client:
    """The collaborators of a fleet's client, in one event loop."""

    def __init__(self, store: Store, app: Celery, brings: frozenset[str]) -> None:
        self.store = store
        self.control = RunControl(store, app)
        self.retries = BatchRetry(store, self.control)
        self.batch_submission = BatchSubmission(store)
        self.standstill = Standstill(store, brings | {PLAIN_AGENT}, starts_workers=bool(brings))
        self.watch = RunWatch(store, self._quiet)
        self.following = RunFollower(store, self.watch)
        self.app = app
        self.closes_app = True
        self._exempt = brings | {PLAIN_AGENT}
        self._accepted: set[str] = set()

    @classmethod
    async def open(
        cls, settings: Settings, brings: frozenset[str], users: Celery | None = None
    ) -> Self:
        """Connect. Raises `StoreError` or `ConfigurationError` as `open_store` does.

        A user's own app is used where there is one, and left open.
        """
        app = users or client_app(settings)
        opened = cls(await open_store(settings, app), app, brings)
        opened.closes_app = users is None
        return opened

    async def aclose(self) -> None:
        """Disconnect."""
        await self.watch.aclose()
        await self.standstill.aclose()
        await self.store.aclose()
        if self.closes_app:
            self.app.close()

    def _quiet(self, waited_for: Callable[[], Sequence[str]]) -> Quiet:
        held = held_runs(self.store, waited_for)
        approvals = approvals_of_runs(self.store, waited_for)
        return Quiet(self.standstill, lambda: needs_of(self.store, waited_for()), held, approvals)

    def quiet_of_batch(self, batch_id: str) -> Quiet:
        """Return the reporter of a batch's standstill."""
        held = held_batch(self.store, batch_id)
        approvals = approvals_of_batch(self.store, batch_id)
        return Quiet(self.standstill, lambda: needs_of_batch(self.store, batch_id), held, approvals)

    async def config_of(self, agent: Agent | str) -> AgentConfig:
        """Return an agent's configuration. Raises `ConfigurationError` for an unknown name."""
        if isinstance(agent, Agent):
            return agent.config
        return await self.store.configs.named(agent)

    async def accept(self, configs: Sequence[AgentConfig]) -> None:
        """Raise `ConfigurationError` for an agent, tool or server that no running worker has.

        Where no worker runs, everything is accepted: they may start later. So is an agent whose
        workers the caller starts.
        """
        unknown = [one for one in configs if one.name not in self._exempt]
        if all(one.digest in self._accepted for one in unknown):
            return
        alive = [one for one in await workers(self.store) if one.alive]
        names = sorted({name for worker in alive for name in worker.agents})
        for config in unknown if alive else ():
            if config.name not in names:
                msg = (
                    f"no running worker has agent {config.name!r} (they have: "
                    f"{', '.join(names) or 'none'}); start workers with --agents naming its module"
                )
                raise ConfigurationError(msg)
            _check_code(config, await self.store.configs.named(config.name))
            self._accepted.add(config.digest)


def _check_code(config: AgentConfig, announced: AgentConfig) -> None:
    """Raise `ConfigurationError` for a tool or server that the workers' agent lacks."""
    servers = {one.name for one in announced.mcp_servers}
    tools = {one.name for one in announced.tools}
    there = f"(it has: {', '.join(sorted(tools)) or 'none'})"
    lacks = [f"MCP server {one.name!r}" for one in config.mcp_servers if one.name not in servers]
    lacks += [f"tool {one.name!r} {there}" for one in config.tools if one.name not in tools]
    if lacks:
        msg = (
            f"agent {config.name!r} on the running workers has no {lacks[0]}; "
            "restart them with the new code"
        )
        raise ConfigurationError(msg)


DATA_FOLDER = Path(".stepfleet")
_LEFT: list[object] = []
"""Connections of a parent process, which must not be collected here: that would close them."""


class FleetSession:
    """One connection, in the loop of its first use; all rooms of a fleet share it.

    Without a Redis in the settings it joins the private server of the folder `.stepfleet`, where
    there is one; with `local`, that one's server, and its worker runs here. `brings` names
    agents whose workers the caller starts; `app` is the user's own Celery app, whose workers do
    the steps.
    """

    def __init__(
        self,
        settings: Settings,
        brings: Collection[str] = (),
        app: Celery | None = None,
        local: LocalFleet | None = None,
    ) -> None:
        self.settings = settings
        self.local = local
        self._app = app
        self._brings = frozenset(brings)
        self._opening: asyncio.Task[Client] | None = None
        self._private: EmbeddedRedis | None = None
        self._process = os.getpid()

    async def aclose(self) -> None:
        """Disconnect, and leave the private server and its worker if there are any."""
        opening, self._opening = self._opening, None
        if opening is not None:
            await asyncio.wait([opening])
            if not opening.cancelled() and opening.exception() is None:
                await opening.result().aclose()
        await self._leave_private()

    def forget(self) -> object:
        """Leave the connection to the process that made it, and return it; for a forked child.

        The next use connects anew. Nothing is closed: sockets and server are the parent's.
        """
        left = (self._opening, self._private)
        opening = self._opening
        done = opening and opening.done() and not (opening.cancelled() or opening.exception())
        if opening and done and self._app is None:  # Celery looks after a user's own app
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

    @property
    def opened(self) -> Store | None:
        """The store, if it is open."""
        opening = self._opening
        is_open = opening and opening.done() and not (opening.cancelled() or opening.exception())
        return opening.result().store if opening and is_open else None

    async def store(self) -> Store:
        """Return the open store. Raises as `open` does."""
        return (await self.open()).store

    async def _connect(self) -> Client:
        settings = self.settings
        if self.local is not None:
            settings = await asyncio.to_thread(self.local.settings, settings)
        elif settings.redis_url is None:
            self._private = await asyncio.to_thread(_private_server)
        if self._private is not None:
            url = SecretStr(self._private.url)
            settings = settings.model_copy(update={"redis_url": url})
        try:
            client = await Client.open(settings, self._brings, self._app)
            if self.local is not None:
                await asyncio.to_thread(self.local.work, settings)
        except BaseException:
            await self._leave_private()
            raise
        return client

    async def _leave_private(self) -> None:
        if self.local is not None:
            await asyncio.to_thread(self.local.stop)
        private, self._private = self._private, None
        if private is not None:
            await asyncio.to_thread(private.stop)


def _private_server() -> EmbeddedRedis:
    folder = DATA_FOLDER.absolute()
    if not Folder(folder).has_data:
        msg = (
            f"no Redis is named, and {folder} holds no private server: set STEPFLEET_REDIS_URL, "
            "pass redis_url=..., start a fleet in this folder with 'stepfleet up --agents ...', "
            "or use Fleet.local(agents=[...])"
        )
        raise ConfigurationError(msg)
    return EmbeddedRedis.start(DATA_FOLDER, brief=True)
