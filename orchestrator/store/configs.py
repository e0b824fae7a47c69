"""Agents' configurations, stored once each under their content address."""

import time
from collections.abc import Mapping

from pydantic import ValidationError

from stepfleet.orchestrator.agents.config import AgentConfig, with_stored_overrides
from stepfleet.orchestrator.errors import ConfigurationError, SerializationError
from stepfleet.orchestrator.records.text.validation import explain_invalid
from stepfleet.orchestrator.redis_client.connection import Connection
from stepfleet.orchestrator.store.keys import AGENTS, NAMES, NO_PREFIX, USED, Keys

REMEMBERED = 1000
NOTED_SECONDS = 3600.0
"""How often a submitter notes that a configuration is used; old ones are forgotten."""


class Configs:
    """Reads and writes configurations. A read one is cached: it cannot change."""

    def __init__(self, connection: Connection, keys: Keys = NO_PREFIX) -> None:
        self._connection = connection
        self._agents, self._names, self._used = map(keys.of, (AGENTS, NAMES, USED))
        self._known: dict[str, AgentConfig] = {}
        self._saved: dict[str, tuple[int, float]] = {}

    async def save(self, config: AgentConfig) -> str:
        """Store a configuration for a run that is to come, and return its digest."""
        digest, connects, now = config.digest, self._connection.connects, time.monotonic()
        saved, noted = self._saved.get(digest, (-1, 0.0))
        if saved != connects or now > noted + NOTED_SECONDS:  # a failover may have lost it
            used = (await self._connection.now()).timestamp()
            # In this order: a worker that forgets it at the same time checks for a use once more.
            await self._connection.execute("ZADD", self._used, "GT", used, digest)
            await self._connection.execute("HSETNX", self._agents, digest, config.to_json())
            self._remember(digest, config)
            self._saved[digest] = (connects, now)
        return digest

    async def load(self, digest: str) -> AgentConfig:
        """Return the configuration with that digest.

        Raises `SerializationError` if there is none, or this version cannot read it.
        """
        if digest not in self._known:
            stored = await self._connection.execute("HGET", self._agents, digest)
            if stored is None:
                msg = f"the configuration {digest} of a run is not in the store"
                raise SerializationError(msg)
            try:
                self._remember(digest, AgentConfig.from_json(stored))
            except ValidationError as error:
                msg = f"the run's configuration cannot be read: {explain_invalid(error)}"
                raise SerializationError(msg) from error
        return self._known[digest]

    async def of_run(self, header: Mapping[str, str]) -> AgentConfig:
        """Return the configuration of a run: that of its agent with the run's own overrides."""
        config = await self.load(header["config"])
        return with_stored_overrides(config, header.get("overrides"))

    async def announce(self, config: AgentConfig) -> None:
        """Make an agent known by name, so that clients can submit to it without its code."""
        digest = await self.save(config)
        await self._connection.execute("HSET", self._names, config.name, digest)

    async def restore(self, config: AgentConfig) -> None:
        """Announce a configuration that the store has lost; a newer announcement stays."""
        digest = await self.save(config)
        await self._connection.execute("HSETNX", self._names, config.name, digest)

    async def named(self, name: str) -> AgentConfig:
        """Return the configuration of the agent that workers announced under `name`.

        Raises `ConfigurationError` that lists the names which are known.
        """
        digest = await self._connection.execute("HGET", self._names, name)
        if digest is None:
            known = sorted(await self._connection.execute("HKEYS", self._names))
            msg = (
                f"no agent is named {name!r}; workers know: {', '.join(known) or 'none'}. "
                "Start a worker with --agents MODULE (it announces them before it is ready), or "
                "pass the agent itself"
            )
            raise ConfigurationError(msg)
        return await self.load(digest)

    def _remember(self, digest: str, config: AgentConfig) -> None:
        if len(self._known) >= REMEMBERED:
            oldest = next(iter(self._known))
            del self._known[oldest]
            self._saved.pop(oldest, None)
        self._known[digest] = config
