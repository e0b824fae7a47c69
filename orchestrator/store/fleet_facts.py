"""Reads what is going on: active runs, waiting messages, workers. Decides nothing."""

from collections import Counter
from collections.abc import Iterable

from redis.exceptions import RedisError

from stepfleet.orchestrator.errors import AgentException
from stepfleet.orchestrator.overview import (
    FleetOverview,
    WorkerSeen,
    unserved_queues,
    workers_seen,
)
from stepfleet.orchestrator.protocol.waiting import waits_in
from stepfleet.orchestrator.store import keys
from stepfleet.orchestrator.store.opening import OpenStore
from stepfleet.orchestrator.store.soundness import server_info

FORGOTTEN_SECONDS = 24 * 3600.0
LOOKED_AT = 10_000
"""So many active runs are looked at, at most, where a queue has no worker."""
TOGETHER = 500


async def overview(store: OpenStore) -> FleetOverview:
    """Return the fleet at this moment."""
    info = await server_info(store.connection)
    active, oldest = await _due(store)
    seen, waiting = await workers(store), await _waiting(store)
    return FleetOverview(
        redis_version=str(info.get("redis_version", "unknown")),
        active=active,
        queue_length=waiting,
        oldest_due_seconds=oldest,
        workers=tuple(seen),
        quarantined=await _quarantined(store),
        unserved=await _unserved(store, seen, active if waiting is None else waiting),
    )


async def workers(store: OpenStore) -> list[WorkerSeen]:
    """Return the workers as they last reported."""
    reports = await store.connection.execute("HGETALL", keys.WORKERS)
    now = (await store.connection.now()).timestamp()
    return workers_seen(reports, now=now, silence=store.settings.lease / 2)


async def forget_workers(store: OpenStore) -> None:
    """Remove the reports of workers that have been silent for a day."""
    gone = [one.name for one in await workers(store) if one.seen_seconds_ago > FORGOTTEN_SECONDS]
    if gone:
        await store.connection.execute("HDEL", keys.WORKERS, *gone)


async def _due(store: OpenStore) -> tuple[int, float]:
    shards = [store.keys.due(shard) for shard in range(store.keys.shards)]
    run = store.connection.execute_all
    counts = await run(*(("ZCARD", key) for key in shards))
    firsts = await run(*(("ZRANGE", key, 0, 0, "WITHSCORES") for key in shards))
    seconds, _ = await store.connection.execute("TIME")
    times = [float(flat[1]) / 1000 for flat in firsts if flat]
    oldest = max(int(seconds) - min(times), 0.0) if times else 0.0
    return sum(counts), round(oldest, 1)


async def _unserved(store: OpenStore, seen: Iterable[WorkerSeen], steps: int) -> dict[str, int]:
    """Return how many runs wait for each queue that nobody serves; `steps` for that of steps."""
    own = store.settings.queue
    lacking = unserved_queues(seen, own)
    if not lacking:
        return {}
    waits = await _waits_for_tools(store)
    return {queue: steps if queue == own else waits[queue] for queue in lacking}


async def _waits_for_tools(store: OpenStore) -> Counter[str]:
    """Return how many runs wait for tools of each queue, among the first that are due."""
    found: Counter[str] = Counter()
    last = LOOKED_AT // store.keys.shards
    for shard in range(store.keys.shards):
        runs = await store.connection.execute("ZRANGE", store.keys.due(shard), 0, last)
        for some in (runs[at : at + TOGETHER] for at in range(0, len(runs), TOGETHER)):
            headers = await store.connection.execute_all(
                *(("HMGET", store.keys.run(run_id), "waiting", "step") for run_id in some)
            )
            for text, step in headers:
                found.update({wait.queue for wait in waits_in(text or "", step or "")})
    return found


async def _waiting(store: OpenStore) -> int | None:
    try:
        return await store.dispatch.waiting()
    except (AgentException, RedisError):
        raise
    except Exception:  # noqa: BLE001 - every broker has exceptions of its own
        return None


async def _quarantined(store: OpenStore) -> int:
    kind = await store.connection.execute("TYPE", keys.QUARANTINE)
    asks = {"list": "LLEN", "stream": "XLEN", "hash": "HLEN", "set": "SCARD", "zset": "ZCARD"}
    return int(await store.connection.execute(asks[kind], keys.QUARANTINE)) if kind in asks else 0
