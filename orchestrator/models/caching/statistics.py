"""Size and hits of the response cache, in all and by model. Pure."""

from collections.abc import Iterable, Mapping

from pydantic import Field

from stepfleet.orchestrator.records.base import Record

FIELDS = ("entries", "bytes", "hits", "misses")


class ModelCacheStatistics(Record):
    """The entries of one model and their size in bytes; reads that found one, or none."""

    entries: int = 0
    bytes: int = 0
    hits: int = 0
    misses: int = 0


class CacheStatistics(Record):
    """The fleet's response cache. `max_bytes` bounds its entries together.

    Reads are counted as they happen: a step that is repeated after a crash reads again. The steps'
    own counts are in their records, `usage.cached_calls` of runs.
    """

    entries: int = 0
    bytes: int = 0
    max_bytes: int = 0
    hits: int = 0
    misses: int = 0
    by_model: dict[str, ModelCacheStatistics] = Field(default_factory=dict)

    @property
    def hit_rate(self) -> float:
        """The share of reads that found an entry, 0 to 1."""
        reads = self.hits + self.misses
        return self.hits / reads if reads else 0.0


def statistics_of(counts: Iterable[Mapping[str, str]], max_bytes: int) -> CacheStatistics:
    """Return the sums over the counters of all parts of the cache (`field:model` to number)."""
    by_model: dict[str, dict[str, int]] = {}
    for part in counts:
        for name, value in part.items():
            field, _, model = name.partition(":")
            if field in FIELDS:
                sums = by_model.setdefault(model, dict.fromkeys(FIELDS, 0))
                sums[field] += int(value)
    models = {
        model: ModelCacheStatistics(**sums)
        for model, sums in sorted(by_model.items())
        if any(sums.values())
    }
    sums = {field: sum(getattr(one, field) for one in models.values()) for field in FIELDS}
    return CacheStatistics(max_bytes=max_bytes, by_model=models, **sums)
