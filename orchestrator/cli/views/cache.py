"""What the command line says of the response cache."""

import sys
from pathlib import Path

from rich.table import Table

from stepfleet.orchestrator.cli.setup.with_fleet import with_fleet
from stepfleet.orchestrator.cli.terminal.format import count, shown
from stepfleet.orchestrator.cli.terminal.output import print_json, screen
from stepfleet.orchestrator.client.fleet import AsyncFleet
from stepfleet.orchestrator.models.caching.statistics import CacheStatistics

_NAME = 60


def print_statistics(data: Path, *, json: bool) -> None:
    """Print what the cache holds and how often it helped."""

    async def tell(fleet: AsyncFleet) -> None:
        found = await fleet.cache.statistics()
        if json:
            print_json({**found.to_dict(), "hit_rate": found.hit_rate})
        else:
            screen().print(statistics_picture(found))

    with_fleet(data, tell)


def clear_cache(model: str | None, key: str | None, data: Path, *, json: bool) -> None:
    """Drop entries and print how many went."""

    async def drop(fleet: AsyncFleet) -> None:
        dropped = await fleet.cache.clear(key=key, model=model)
        if json:
            print_json({"dropped": dropped})
        else:
            noun = "entry" if dropped == 1 else "entries"
            sys.stdout.write(f"{count(dropped)} {noun} dropped\n")

    with_fleet(data, drop)


def statistics_picture(found: CacheStatistics) -> Table:
    """Return a row for each model, and one for all. Pure."""
    table = Table("model", "entries", "bytes", "hits", "misses", show_edge=False)
    for model, one in found.by_model.items():
        cells = (one.entries, one.bytes, one.hits, one.misses)
        table.add_row(shown(model, _NAME), *map(count, cells))
    cells = (found.entries, found.bytes, found.hits, found.misses)
    table.add_row("all", *map(count, cells))
    table.caption = f"{found.hit_rate:.0%} hits; room for {count(found.max_bytes)} bytes"
    return table
