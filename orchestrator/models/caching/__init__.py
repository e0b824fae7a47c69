"""Decisions of the response cache: the agents that take part, equal requests, answers to keep.

Pure: knows no store and makes no call. `store.response_cache` keeps the entries, the worker's
`response_cache` reads them.
"""

from stepfleet.orchestrator.models.caching.policy import CachePolicy
from stepfleet.orchestrator.models.caching.statistics import CacheStatistics, ModelCacheStatistics

__all__ = ["CachePolicy", "CacheStatistics", "ModelCacheStatistics"]
