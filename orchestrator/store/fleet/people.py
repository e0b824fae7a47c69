"""Reads how many calls wait for people, and the oldest of them: for metrics, `doctor`, Flower."""

from dataclasses import dataclass

from stepfleet.orchestrator.records.calls.answers import Ask
from stepfleet.orchestrator.store.opening.opening import OpenStore
from stepfleet.orchestrator.store.runs.asks import Asks
from stepfleet.orchestrator.store.runs.tool_calls import ToolCalls

_OLDEST = 100


@dataclass(frozen=True, slots=True)
class AskFigures:
    """How many calls wait for people, and since when the oldest does (Unix time in ms), if any.

    Calls of runs that were cancelled count until somebody lists what waits.
    """

    count: int
    oldest: float | None


async def ask_figures(store: OpenStore) -> AskFigures:
    """Return how many calls wait for people: two small commands for each shard."""
    names = [f"{store.keys.tag(shard)}asks" for shard in range(store.keys.shards)]
    run = store.connection.execute_all
    counts = await run(*(("ZCARD", name) for name in names))
    firsts = await run(*(("ZRANGE", name, 0, 0, "WITHSCORES") for name in names))
    return AskFigures(sum(counts), min((float(one[1]) for one in firsts if one), default=None))


async def oldest_asks(store: OpenStore) -> list[Ask]:
    """Return the calls that have waited longest for people, a hundred at most."""
    found, _ = await asks_of(store).page(_OLDEST, None)
    return [one.ask for one in found]


def asks_of(store: OpenStore) -> Asks:
    """Return what reads and answers the calls of a store that wait for people."""
    lease, grace = store.settings.lease, store.settings.grace
    given = (store.connection, store.keys)
    return Asks(*given, ToolCalls(*given, store.configs, store.dispatch, lease=lease, grace=grace))
