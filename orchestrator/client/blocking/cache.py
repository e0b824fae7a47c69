"""The verbs on the response cache for plain code. Holds no logic: `fleet_cache` has it."""

from stepfleet.orchestrator.client.fleet import AsyncFleet
from stepfleet.orchestrator.client.portal import Portal
from stepfleet.orchestrator.models.caching.statistics import CacheStatistics


class SyncCache:
    """Verbs on the response cache; see `FleetCache` for what each does."""

    _fleet: AsyncFleet
    _portal: Portal

    def cache_statistics(self) -> CacheStatistics:
        """Return the entries, their size in bytes, hits and misses, in all and by model."""
        return self._portal.call(self._fleet.cache_statistics())

    def clear_cache(self, *, key: str | None = None, model: str | None = None) -> int:
        """Drop one entry, those of one model, or all; return how many went."""
        return self._portal.call(self._fleet.clear_cache(key=key, model=model))
