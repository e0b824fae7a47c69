"""Agents' configurations, stored once each under their content address.

Runs keep theirs for as long as they exist, whatever their age and state; one that no run refers to
is forgotten when it was not submitted for the retention time.
"""

import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import suppress

from pydantic import ValidationError

from stepfleet.orchestrator.agents.config import AgentConfig, with_stored_overrides
from stepfleet.orchestrator.errors import ConfigurationError, SerializationError
from stepfleet.orchestrator.records.text.validation import explain_invalid
from stepfleet.orchestrator.redis_client.connection import Connection
from stepfleet.orchestrator.store.keys import AGENTS, NAMES, NO_PREFIX, PREFIX, SWEPT, USED, Keys
from stepfleet.orchestrator.store.lua import run_script

REMEMBERED = 1000
NOTED_SECONDS = 3600.0
"""How often a submitter notes that a configuration is used; old ones are forgotten."""
LEAST_SECONDS = 24 * 3600
"""However short the retention is: submitters note the use of a configuration once an hour."""
PAUSE_SECONDS = 6 * 3600
"""How often one worker of a fleet looks: it reads the names of all keys where one is old."""
PAGE = 1000
LOOKS = 2


class Configs:
    """Reads and writes configurations. A read one is cached: it cannot change."""

    def __init__(self, connection: Connection, keys: Keys = NO_PREFIX) -> None:
        self._connection = connection
        self._keys = keys
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

    def remember(self, digest: str, text: str) -> None:
        """Know a configuration that was read elsewhere: from the archive, which keeps its own."""
        if digest not in self._known:
            with suppress(ValidationError):
                self._remember(digest, AgentConfig.from_json(text))

    async def text(self, digest: str) -> str | None:
        """Return a configuration as it is stored; None where there is none."""
        stored = await self._connection.execute("HGET", self._agents, digest)
        return None if stored is None else str(stored)

    async def has(self, digest: str) -> bool:
        """Return whether there is a configuration of that digest, readable or not."""
        return bool(await self._connection.execute("HEXISTS", self._agents, digest))

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

    async def forget_unused(self, retention: float) -> int:
        """Forget stale configurations, if it is time to look; return how many.

        Stale are those that no run refers to, and that were not submitted for `retention` seconds.
        Raises `StoreError` or `redis.exceptions.RedisError` when Redis stays out of reach.
        """
        lock = ("SET", self._keys.of(SWEPT), "1", "NX", "EX", PAUSE_SECONDS)
        if not await self._connection.execute(*lock):
            return 0
        return await self.forget_stale(retention)

    async def forget_stale(self, retention: float) -> int:
        """Forget stale configurations now; return how many."""
        connection = self._connection
        stale = await self._unused(max(retention, LEAST_SECONDS))
        if stale:
            for digest in await connection.execute("HVALS", self._names):
                stale.pop(digest, None)
        used: set[str] = set()
        connects = connection.connects
        # Twice: one look may miss a run that moves between two servers meanwhile.
        for _ in range(LOOKS if stale else 0):
            async for digests in self._referred_to():
                used |= digests & stale.keys()
        if connects != connection.connects:  # perhaps to another server, where the scan began anew
            return 0
        if used:
            now = (await connection.now()).timestamp()
            fresh = [part for digest in used for part in (now, digest)]
            await connection.execute("ZADD", self._used, "GT", *fresh)
        for digest in used:
            del stale[digest]
        gone = [await self._forget(*one) for one in stale.items()]
        return sum(gone)

    async def _unused(self, seconds: float) -> dict[str, str]:
        """Return old configurations and their last uses; unknown ones count from now on."""
        execute = self._connection.execute
        now = (await self._connection.now()).timestamp()
        known = await execute("HKEYS", self._agents)
        for at in range(0, len(known), PAGE):
            fresh = [part for digest in known[at : at + PAGE] for part in (now, digest)]
            await execute("ZADD", self._used, "NX", *fresh)
        until = f"({now - seconds}"
        flat = await execute("ZRANGEBYSCORE", self._used, "-inf", until, "WITHSCORES")
        return dict(zip(flat[::2], flat[1::2], strict=True))

    async def _referred_to(self) -> AsyncIterator[set[str]]:
        """Yield the configurations of all runs, page by page."""
        for server in await self._connection.servers():
            cursor = 0
            while True:
                match = self._keys.of(f"{PREFIX}:{{s*}}:run:*")
                cursor, found = await server.scan(cursor, match, PAGE, "HASH")
                yield await self._configs_of(found)
                if not int(cursor):
                    break

    async def _configs_of(self, found: Iterable[str | bytes]) -> set[str]:
        # Other hashes of a run have no such field; a run's id may end like the names of those.
        reads = (("HGET", key, "config") for key in found)
        return {digest for digest in await self._connection.execute_all(*reads) if digest}

    async def _forget(self, digest: str, used: str) -> bool:
        """Forget a configuration unless it is used meanwhile; return whether it is gone."""
        execute = self._connection.execute
        text = await execute("HGET", self._agents, digest)
        if not await run_script(self._connection, "unused", [self._used], digest, used):
            return False
        await execute("HDEL", self._agents, digest)
        # A user notes its use and then writes the configuration: in between it was there still.
        again = await execute("ZSCORE", self._used, digest)
        if again is not None and text is not None:
            await execute("HSETNX", self._agents, digest, text)
        return again is None

    def _remember(self, digest: str, config: AgentConfig) -> None:
        if len(self._known) >= REMEMBERED:
            oldest = next(iter(self._known))
            del self._known[oldest]
            self._saved.pop(oldest, None)
        self._known[digest] = config
