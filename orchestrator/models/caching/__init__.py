"""The response cache as it decides: who takes part, which requests are the same, what is kept.

Pure: knows no store and makes no call. `store.response_cache` keeps the entries, the worker's
`response_cache` asks for them.
"""

from stepfleet.orchestrator.models.caching.policy import CachePolicy
from stepfleet.orchestrator.models.caching.statistics import CacheStatistics, ModelCacheStatistics

__all__ = ["CachePolicy", "CacheStatistics", "ModelCacheStatistics"]
