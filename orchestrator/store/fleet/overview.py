"""Reads the state of the fleet, also in numbers for metrics: active runs, messages, workers."""

import os
import socket
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import orjson
from pydantic import Field
from redis.exceptions import RedisError

from stepfleet.orchestrator.errors import AgentException
from stepfleet.orchestrator.protocol.waiting import queues_of
from stepfleet.orchestrator.records.base import Record
from stepfleet.orchestrator.records.state import Lifecycle
from stepfleet.orchestrator.store import keys
from stepfleet.orchestrator.store.circuits import ServiceOutage
from stepfleet.orchestrator.store.codec import WAIT, awaited_calls
from stepfleet.orchestrator.store.fleet.servers import ServerFacts, health_findings, server_info
from stepfleet.orchestrator.store.limits import LimitState
from stepfleet.orchestrator.store.store import Store
from stepfleet.orchestrator.version import Build

REPORT_SCHEMA = 2
"""Of workers' reports. Later ones may have more fields; those that are known keep their meaning."""
_REPORTED = (
    *("held", "slots", "agents", "queues", "tool_queues"),
    *("stopping", "version", "commit", "release", "rss_bytes", "started_at"),
)
FORGOTTEN_SECONDS = 24 * 3600.0
LOOKED_AT = 10_000
"""How many active runs are read, at most, where a queue has no worker."""
TOGETHER = 500
SAMPLED = 100
_MOVES = frozenset({Lifecycle.QUEUED, Lifecycle.IN_PROGRESS})
"""The states in which a run waits for a worker, or has one."""


class KeeperSeen(Record):
    """A process as it last reported that looks after the fleet: a keeper, or a worker.

    `name` of a keeper is `host:pid`. `seen_seconds_ago` grows when it is gone. `version` and
    `commit` are those of stepfleet, `release` the setting of that name, `rss_bytes` the process's
    memory; those of a version that does not report them are empty. Keepers' reports are not among
    the workers': earlier versions would count them.
    """

    name: str
    seen_seconds_ago: float
    alive: bool = True
    version: str = ""
    commit: str = ""
    release: str = ""
    rss_bytes: int | None = None
    started_at: datetime | None = None

    @property
    def build(self) -> Build:
        """Its build of stepfleet."""
        return Build(self.version, self.commit)


class WorkerSeen(KeeperSeen):
    """A worker process as it last reported: a keeper that does steps.

    `name` is that of its node in Celery, with the process id after it for a child of a pool;
    `process` is `host:pid`. `queues` are the queues that it serves (None where it does not report
    them), `tool_queues` those that the tools of its agents need. `stopping`: it takes no new steps.
    """

    process: str = ""
    held: int = 0
    slots: int = 0
    agents: tuple[str, ...] = ()
    queues: tuple[str, ...] | None = None
    tool_queues: tuple[str, ...] = ()
    stopping: bool = False


class FleetOverview(Record):
    """The fleet at one moment.

    `active` counts runs that are ready, held or waiting for a time; `queue_length` the task
    messages that wait (None where the broker does not report it); `oldest_due_seconds` how long
    the run that waits longest is overdue (0 when none is). `unserved` has the queues that no
    living worker serves and some need, each with the number of runs that wait for it; `troubles`
    what keeps all workers from their work, each with its fix; `paused`: the whole fleet is;
    `outages` the services of models that are out; `limited` the limits for which most runs wait;
    `waiting_for_people` counts calls that wait for an approval or an answer; `keepers` look after
    the fleet without doing steps.
    """

    redis_version: str
    active: int
    queue_length: int | None
    oldest_due_seconds: float
    workers: tuple[WorkerSeen, ...] = Field(default=())
    quarantined: int = 0
    unserved: dict[str, int] = Field(default_factory=dict)
    troubles: tuple[str, ...] = ()
    paused: bool = False
    outages: tuple[ServiceOutage, ...] = ()
    limited: tuple[LimitState, ...] = ()
    waiting_for_people: int = 0
    keepers: tuple[KeeperSeen, ...] = ()


class Need(Record):
    """What a run waits for: a worker that serves `queue` and has `agent`."""

    queue: str
    agent: str


def workers_seen(reports: Mapping[str, str], *, now: float, lease: float) -> list[WorkerSeen]:
    """Return the workers behind `reports`; those silent for half a lease count as gone.

    Beyond the end of its last leases it holds nothing. `now` and `lease` are in seconds. A report
    that this version cannot read tells only that there is one: a silent worker of that name.
    """
    found = [_worker_seen(process, text, now, lease) for process, text in sorted(reports.items())]
    return sorted(found, key=lambda one: one.name)


def _worker_seen(process: str, report: str, now: float, lease: float) -> WorkerSeen:
    try:
        state = orjson.loads(report)
        ago = max(now - float(state.get("seen", 0)), 0.0)
        if ago > lease * 1.5:  # it may have renewed them between its last report and the next
            state["held"] = 0
        return WorkerSeen(
            name=state.get("name", process),
            process=process,
            seen_seconds_ago=round(ago, 1),
            **{field: state[field] for field in _REPORTED if field in state},
            alive=ago <= lease / 2 and not is_gone_here(process, socket.gethostname()),
        )
    except (ValueError, TypeError, AttributeError):  # no JSON, or not of these fields
        return WorkerSeen(name=process, process=process, seen_seconds_ago=now, alive=False)


def keeper_of(seen: WorkerSeen) -> KeeperSeen:
    """Return a keeper, whose report is read as a worker's."""
    known = seen.model_dump(include=set(KeeperSeen.model_fields))
    return KeeperSeen.model_validate({**known, "name": seen.process})


def unserved_queues(workers: Iterable[WorkerSeen], steps: str) -> tuple[str, ...]:
    """Return the queues that no living worker serves: of steps, and of the agents' tools.

    Nothing where no worker lives, or one does not report its queues.
    """
    served: set[str] = set()
    needed = {steps}
    alive = [one for one in workers if one.alive]
    for one in alive:
        if one.queues is None:
            return ()
        served.update(one.queues)
        needed.update(one.tool_queues)
    return tuple(sorted(needed - served)) if alive else ()


def is_gone_here(name: str, host: str) -> bool:
    """Return whether `name` is `host:pid`, and that process of this machine is gone.

    `host` is this machine, or a Celery worker on it.
    """
    place, _, pid = name.rpartition(":")
    if place != host or not pid.isdigit():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


async def overview(store: Store) -> FleetOverview:
    """Return the fleet at this moment."""
    info = await server_info(store.connection)
    active, oldest = await _due(store)
    seen, (waiting, broker) = await workers(store), await _waiting(store)
    return FleetOverview(
        redis_version=str(info.get("redis_version", "unknown")),
        active=active,
        queue_length=waiting,
        oldest_due_seconds=oldest,
        workers=tuple(seen),
        quarantined=await _quarantined(store),
        unserved=await _unserved(store, seen, active if waiting is None else waiting),
        troubles=(*_that_stop(info), *broker),
        paused=await is_paused(store),
        outages=tuple(await store.circuits.outages()),
        limited=await store.limits.lines(),
        waiting_for_people=(await store.approvals.figures()).count,
        keepers=tuple(await keepers(store)),
    )


async def is_paused(store: Store) -> bool:
    """Return whether the whole fleet is paused."""
    return bool(await store.connection.execute("HEXISTS", store.keys.flags(0), "fleet"))


async def troubles(store: Store) -> list[str]:
    """Return the problems that stop all workers, each with its fix."""
    found = _that_stop(await server_info(store.connection))
    return found if store.dispatch.in_script else [*found, *(await _waiting(store))[1]]


def _that_stop(info: Mapping[str, Any]) -> list[str]:
    return [one.text for one in health_findings(ServerFacts.of(info)) if one.stops]


async def workers(store: Store) -> list[WorkerSeen]:
    """Return the workers as they last reported."""
    return await _seen(store, keys.WORKERS)


async def keepers(store: Store) -> list[KeeperSeen]:
    """Return the keepers as they last reported."""
    return [keeper_of(one) for one in await _seen(store, keys.KEEPERS)]


async def _seen(store: Store, key: str) -> list[WorkerSeen]:
    reports = await store.connection.execute("HGETALL", store.keys.of(key))
    now = (await store.connection.now()).timestamp()
    return workers_seen(reports, now=now, lease=store.settings.lease)


async def forget_workers(store: Store) -> None:
    """Remove the reports of workers and keepers that have been silent for a day."""
    for key in (keys.WORKERS, keys.KEEPERS):
        seen = await _seen(store, key)
        if gone := [one.process for one in seen if one.seen_seconds_ago > FORGOTTEN_SECONDS]:
            await store.connection.execute("HDEL", store.keys.of(key), *gone)


async def is_looked_after(store: Store) -> bool:
    """Return whether a worker or a keeper is alive: schedules are then submitted."""
    if any(one.alive for one in await workers(store)):
        return True
    return any(one.alive for one in await keepers(store))


async def _due(store: Store) -> tuple[int, float]:
    shards = [store.keys.due(shard) for shard in range(store.keys.shards)]
    run = store.connection.execute_all
    counts = await run(*(("ZCARD", key) for key in shards))
    firsts = await run(*(("ZRANGE", key, 0, 0, "WITHSCORES") for key in shards))
    now = (await store.connection.read_clock()).timestamp()
    times = [float(flat[1]) / 1000 for flat in firsts if flat]
    oldest = max(now - min(times), 0.0) if times else 0.0
    return sum(counts), round(oldest, 1)


async def _unserved(store: Store, seen: Iterable[WorkerSeen], steps: int) -> dict[str, int]:
    """Return how many runs wait for each queue that nobody serves; `steps` for that of steps."""
    own = store.settings.queue
    lacking = unserved_queues(seen, own)
    if not lacking:
        return {}
    waits = await _waits_for_tools(store)
    return {queue: steps if queue == own else waits[queue] for queue in lacking}


async def needs_of(store: Store, run_ids: Sequence[str], batch: str = "") -> list[Need]:
    """Return what these runs need, those of the `batch` only if one is given; once each."""
    fields = ("status", "token", "batch", "agent", *WAIT)
    heads = await store.connection.execute_all(
        *(("HMGET", store.keys.run(run_id), *fields) for run_id in run_ids)
    )
    found = set()
    for status, token, of, agent, *waits in heads:
        if status in _MOVES and not token and batch in ("", of):
            queues = _queues_of(waits, store)
            found |= {(queue, agent) for queue in queues or {store.settings.queue}}
    return [Need(queue=queue, agent=agent) for queue, agent in sorted(found)]


async def needs_of_batch(store: Store, batch: str) -> list[Need]:
    """Return what the batch's runs need, by a sample of those that wait longest."""
    due = [store.keys.due(shard) for shard in range(store.keys.shards)]
    last = max(SAMPLED // len(due), 2) - 1
    found = await store.connection.execute_all(*(("ZRANGE", key, 0, last) for key in due))
    return await needs_of(store, [one for shard in found for one in shard], batch)


async def _waits_for_tools(store: Store) -> Counter[str]:
    """Return how many runs wait for tools of each queue, among the first that are due."""
    found: Counter[str] = Counter()
    last = LOOKED_AT // store.keys.shards
    for shard in range(store.keys.shards):
        runs = await store.connection.execute("ZRANGE", store.keys.due(shard), 0, last)
        for some in (runs[at : at + TOGETHER] for at in range(0, len(runs), TOGETHER)):
            headers = await store.connection.execute_all(
                *(("HMGET", store.keys.run(run_id), *WAIT) for run_id in some)
            )
            for waits in headers:
                found.update(_queues_of(waits, store))
    return found


def _queues_of(waits: Sequence[str | None], store: Store) -> set[str]:
    """Return the queues of the calls that a run waits for, by fields of its header."""
    calls = awaited_calls(dict(zip(WAIT, waits, strict=True)))
    return queues_of(calls, store.settings.queue)


async def waiting_messages(store: Store) -> int | None:
    """Return how many messages wait in the queue of steps; None where the broker does not tell."""
    return (await _waiting(store))[0]


async def _waiting(store: Store) -> tuple[int | None, list[str]]:
    """Return how many messages wait, and what is wrong with a broker apart from the store."""
    try:
        return await store.dispatch.waiting(), []
    except (AgentException, RedisError) as error:
        if store.dispatch.in_script:
            raise
        return None, [f"{str(error).rstrip('.')}. Fix: start it, or correct STEPFLEET_BROKER_URL"]
    except Exception:  # noqa: BLE001 - every broker has exceptions of its own
        return None, []


async def _quarantined(store: Store) -> int:
    quarantine = store.keys.of(keys.QUARANTINE)
    kind = await store.connection.execute("TYPE", quarantine)
    asks = {"list": "LLEN", "stream": "XLEN", "hash": "HLEN", "set": "SCARD", "zset": "ZCARD"}
    return int(await store.connection.execute(asks[kind], quarantine)) if kind in asks else 0
