"""The entries of the response cache: in the store's Redis, shared by the fleet, bounded in size.

Sixteen parts, each in one slot of a cluster. Knows keys, models and text; `models.caching` decides
the meaning of an entry, and which requests are the same.
"""

import asyncio
import re
from typing import Any

from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.models.caching import CacheStatistics, statistics_of
from stepfleet.orchestrator.store.codec import pairs
from stepfleet.orchestrator.store.gateway import Gateway, Opened
from stepfleet.orchestrator.store.keys import PREFIX
from stepfleet.orchestrator.store.lua import run_script

PARTS = 16
PAGE = 500
_SCRIPT = "cache"
_KEY = re.compile(r"[0-9a-f]{64}")


class CacheEntries(Gateway):
    """Reads, keeps and drops entries; the setting `cache_bytes` limits all of them together."""

    def __init__(self, opened: Opened) -> None:
        super().__init__(opened)
        self._max_bytes = opened.settings.cache_bytes
        self._parts = [opened.keys.of(f"{PREFIX}:{{c{part:02d}}}:cache") for part in range(PARTS)]

    async def read(self, key: str, model: str) -> str | None:
        """Return an entry, or None; counts the read. Raises `StoreError` as the connection does."""
        entry: str | None = await self._run(self._part_of(key), "read", key, model)
        return entry

    async def keep(self, key: str, model: str, entry: str, ttl: int) -> bool:
        """Keep an entry for `ttl` seconds; return whether it had room.

        Those that would expire next make room for it.
        """
        share = self._max_bytes // PARTS
        kept = await self._run(self._part_of(key), "keep", key, model, ttl * 1000, share, entry)
        return bool(kept)

    async def statistics(self) -> CacheStatistics:
        """Return the sizes and the numbers of reads."""
        counts = await asyncio.gather(*(self._run(name, "count") for name in self._parts))
        return statistics_of(map(pairs, counts), self._max_bytes)

    async def drop(self, key: str) -> int:
        """Drop one entry; return 1, or 0 where there was none.

        Raises `ConfigurationError` for an invalid key.
        """
        if not _KEY.fullmatch(key):
            msg = f"{key[:80]!r} is not the key of a cached answer; a step has it in `cache.key`"
            raise ConfigurationError(msg)
        return int(await self._run(self._part_of(key), "drop", key))

    async def drop_model(self, model: str) -> int:
        """Drop all entries of a model, named as its agents name it; return how many they were."""
        dropped = await asyncio.gather(*(self._drop_model(name, model) for name in self._parts))
        return sum(dropped)

    async def clear(self) -> int:
        """Drop all entries and counters; return how many entries they were."""
        return sum(await asyncio.gather(*map(self._clear, self._parts)))

    async def _drop_model(self, part: str, model: str) -> int:
        cursor, dropped = "0", 0
        while True:
            cursor, facts = await self._connection.execute(
                "HSCAN", f"{part}:facts", cursor, "COUNT", PAGE
            )
            keys = [key for key, fact in facts.items() if fact.partition(" ")[2] == model]
            if keys:
                dropped += int(await self._run(part, "drop", *keys))
            if str(cursor) == "0":
                return dropped

    async def _clear(self, part: str) -> int:
        cleared = 0
        while went := int(await self._run(part, "clear", PAGE)):
            cleared += went
        return cleared

    async def _run(self, part: str, verb: str, *args: Any) -> Any:
        return await run_script(self._connection, _SCRIPT, [part], verb, *args)

    def _part_of(self, key: str) -> str:
        return self._parts[int(key[0], 16)]
