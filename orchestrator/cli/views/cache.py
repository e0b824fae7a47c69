"""The response cache's statistics, as a terminal shows them. Pure."""

from rich.table import Table

from stepfleet.orchestrator.cli.terminal.format import count, shown
from stepfleet.orchestrator.models.caching.statistics import CacheStatistics

_NAME = 60


def statistics_picture(found: CacheStatistics) -> Table:
    """Return a row for each model, and one for all."""
    table = Table("model", "entries", "bytes", "hits", "misses", show_edge=False)
    for model, one in found.by_model.items():
        cells = (one.entries, one.bytes, one.hits, one.misses)
        table.add_row(shown(model, _NAME), *map(count, cells))
    cells = (found.entries, found.bytes, found.hits, found.misses)
    table.add_row("all", *map(count, cells))
    table.caption = f"{found.hit_rate:.0%} hits; room for {count(found.max_bytes)} bytes"
    return table
