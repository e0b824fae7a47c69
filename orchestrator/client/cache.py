"""The response cache as a client sees it."""

from stepfleet.orchestrator.client.session import FleetSession
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.models.caching import CacheStatistics
from stepfleet.orchestrator.store.response_cache import CacheEntries


class AsyncFleetCache:
    """The response cache, which all workers of the fleet share: `fleet.cache`."""

    def __init__(self, session: FleetSession) -> None:
        self._session = session

    async def statistics(self) -> CacheStatistics:
        """Return the entries, their size in bytes, hits and misses, in all and by model."""
        return await (await self._entries()).statistics()

    async def clear(self, *, key: str | None = None, model: str | None = None) -> int:
        """Drop one entry, those of one model, or all with the counters; return how many went.

        `key` is a step's `cache.key`, `model` as agents name it (`provider:name`). Calls that are
        under way may fill the cache again. Raises `ConfigurationError` for an invalid key.
        """
        if key is not None and model is not None:
            raise ConfigurationError("key and model are two ways to choose; give one of them")
        entries = await self._entries()
        if key is not None:
            return await entries.drop(key)
        return await (entries.clear() if model is None else entries.drop_model(model))

    async def _entries(self) -> CacheEntries:
        return (await self._session.store()).cache
