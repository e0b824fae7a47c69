"""Reads how many calls wait for people, and the oldest of them: for metrics, `doctor`, Flower."""

from dataclasses import dataclass

from stepfleet.orchestrator.records.base import Record
from stepfleet.orchestrator.records.calls.answers import Ask
from stepfleet.orchestrator.records.state import Lifecycle
from stepfleet.orchestrator.store.opening.opening import OpenStore
from stepfleet.orchestrator.store.runs.asks import Asks
from stepfleet.orchestrator.store.runs.submission import call_at
from stepfleet.orchestrator.store.runs.tool_calls import ToolCalls

_OLDEST = 100
_LOOKED = 5_000
"""Calls that are looked at for those of one batch."""
_COUNTED = 1_000


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


class BatchAsks(Record):
    """How many calls of a batch wait for people: up to 1,000, or `is_all` is false.

    It is false, too, where more wait in the fleet than were looked at.
    """

    count: int = 0
    is_all: bool = True


async def asks_of_batch(store: OpenStore, batch_id: str) -> BatchAsks:
    """Return how many calls of a batch's runs, and of those below them, wait for people."""
    names = [f"{store.keys.tag(shard)}asks" for shard in range(store.keys.shards)]
    run, most = store.connection.execute_all, _LOOKED // store.keys.shards
    found = await run(*(("ZRANGE", name, 0, most) for name in names))
    runs = [call_at(member).run_id for part in found for member in part[:most]]
    count = 0
    for at in range(0, len(runs), _COUNTED):
        heads = (
            ("HMGET", store.keys.run(one), "status", "batch", "billed")
            for one in runs[at : at + _COUNTED]
        )
        for status, own, billed in await run(*heads):
            count += (own or billed) == batch_id and not Lifecycle(status).is_terminal
        if count >= _COUNTED:
            return BatchAsks(count=_COUNTED, is_all=False)
    return BatchAsks(count=count, is_all=all(len(part) <= most for part in found))


async def oldest_asks(store: OpenStore) -> list[Ask]:
    """Return the calls that have waited longest for people, a hundred at most."""
    found, _ = await asks_of(store).page(_OLDEST, None)
    return [one.ask for one in found]


def asks_of(store: OpenStore) -> Asks:
    """Return what reads and answers the calls of a store that wait for people."""
    lease, grace = store.settings.lease, store.settings.grace
    given = (store.connection, store.keys)
    return Asks(*given, ToolCalls(*given, store.configs, store.dispatch, lease=lease, grace=grace))
