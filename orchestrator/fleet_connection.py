"""A fleet's connection as its client holds it: opened at the first use, left when closed.

Knows no verbs: those stand in the modules that build on it.
"""

import asyncio
import os
from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import Self

from pydantic import SecretStr

from stepfleet.orchestrator.client import Client
from stepfleet.orchestrator.embedded import EmbeddedRedis
from stepfleet.orchestrator.embedded.folder import Folder
from stepfleet.orchestrator.overview import FleetOverview
from stepfleet.orchestrator.settings import Settings, load_settings
from stepfleet.orchestrator.store.brokers import forget_pools
from stepfleet.orchestrator.store.fleet_facts import overview
from stepfleet.orchestrator.store.soundness import server_info, warnings

DATA_FOLDER = Path(".stepfleet")
_LEFT: list[object] = []
"""Connections of a parent process, which must not be collected here: that would close them."""


class FleetConnection:
    """What all verbs of a fleet share: one connection, in the loop of its first use."""

    def __init__(
        self,
        redis_url: str | None = None,
        *,
        broker_url: str | None = None,
        settings: Settings | None = None,
        brings: Collection[str] = (),
    ) -> None:
        given = {"redis_url": redis_url, "broker_url": broker_url}
        self._settings = settings or load_settings(**given)
        self._brings = frozenset(brings)
        self._opening: asyncio.Task[Client] | None = None
        self._private: EmbeddedRedis | None = None
        self._process = os.getpid()

    async def __aenter__(self) -> Self:
        await self._open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

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

    async def check(self) -> None:
        """Make sure that Redis answers and lets us in.

        Raises `StoreError` or `ConfigurationError` with the fix, within seconds.
        """
        client = await self._open()
        await client.store.connection.execute("PING")

    async def warnings(self) -> list[str]:
        """Return what about the Redis server endangers runs, each with its fix."""
        return warnings(await server_info((await self._open()).store.connection))

    async def overview(self) -> FleetOverview:
        """Return what is going on: active runs, waiting messages, workers."""
        return await overview((await self._open()).store)

    async def _open(self) -> Client:
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
