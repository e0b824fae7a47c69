"""What a worker runs beside its steps, never in their way: rescue, heartbeat, housekeeping."""

import asyncio
import logging
import os
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from importlib import metadata
from pathlib import Path

import orjson
from celery import Celery
from redis.exceptions import RedisError

from stepfleet.orchestrator.agents.agent import Agent
from stepfleet.orchestrator.errors import AgentException
from stepfleet.orchestrator.store import keys
from stepfleet.orchestrator.store.batches.upkeep import LOOK_SECONDS, BatchUpkeep
from stepfleet.orchestrator.store.fleet.overview import REPORT_SCHEMA, fleet_figures, forget_workers
from stepfleet.orchestrator.store.store import Store
from stepfleet.worker.engine.bridge import end_tasks
from stepfleet.worker.leases.lease import Leases
from stepfleet.worker.leases.renewal import RENEWALS_PER_LEASE
from stepfleet.worker.runtime.connect import process_name
from stepfleet.worker.runtime.crash_points import Visit
from stepfleet.worker.runtime.rescuer import Rescuer, Settle
from stepfleet.worker.telemetry.instrumentation import Instrumentation

log = logging.getLogger(__name__)

FIRST_SECONDS = 60.0
"""A worker that has just started has better things to do than housekeeping."""
PAUSE_SECONDS = 3600.0
CHANGE_SECONDS = 1.0
"""A worker that holds more or less than it has reported reports that so soon."""
SCHEDULE_SECONDS = 5.0
"""How often workers look for schedules, unless one is to come sooner."""
BUSY_SECONDS = 0.25
"""The same while some are being submitted."""
MOST_SCHEDULES = 8
"""Schedules that one worker submits at once."""
FOLLOW_SECONDS = 1.0
"""How often a worker looks after batches while some are to follow others."""
ENDED_SECONDS = 0.1
"""How soon after the end of one batch a worker follows the end of another one."""
MOST_FOLLOW_UPS = 4
"""Batches that a worker submits at once."""
STARTED = time.monotonic()
"""When this process began to be a worker."""
LONG_PER_SLOT = 10
"""A queue with more messages per slot than this is long: they need not be published again."""


@dataclass(frozen=True, slots=True)
class Ends:
    """What follows ends: `settle` sends what a run owes to others, `batch_ended` is set."""

    settle: Settle
    batch_ended: asyncio.Event


def background_tasks(
    opened: Store,
    agents: Sequence[Agent],
    leases: Leases,
    app: Celery,
    crash: Visit,
    instrumentation: Instrumentation,
    ends: Ends,
) -> list[asyncio.Task[None]]:
    """Start them; they run until they are cancelled."""
    settings = opened.settings
    slots = leases.slots() if leases.slots else settings.slots
    rescuer = Rescuer(
        opened.connection,
        opened.keys,
        opened.dispatch,
        grace=settings.grace,
        interval=settings.rescue_interval,
        long_queue=min(settings.slots, LONG_PER_SLOT * slots),
        jitter=random.random,
    )
    rescuer.settle = ends.settle
    rescuer.calm = rescuer.clock.tolerance = settings.lease / RENEWALS_PER_LEASE
    named = {
        "stepfleet-rescuer": rescuer.watch(crash, instrumentation.rescued),
        "stepfleet-heartbeat": heartbeat(opened, agents, leases, app),
        "stepfleet-records": keep_records(opened),
        "stepfleet-batches": keep_batches(opened, ends.batch_ended),
        "stepfleet-schedules": keep_schedules(opened),
    }
    tasks = [asyncio.create_task(work, name=name) for name, work in named.items()]
    held = (lambda: len(leases) - leases.calls, lambda: leases.calls)
    watches = instrumentation.background(*held, partial(fleet_figures, opened))
    return [*tasks, *(asyncio.create_task(one) for one in watches)]


async def heartbeat(opened: Store, agents: Sequence[Agent], leases: Leases, app: Celery) -> None:
    """Report that this worker lives, and what it holds; announce agents again after a failover."""
    connection, announced = opened.connection, opened.connection.connects
    every = opened.settings.lease / RENEWALS_PER_LEASE
    reported: object = None
    at = float("-inf")
    while True:
        held = len(leases), leases.draining
        if held != reported or time.monotonic() - at >= every:
            reported, at = held, time.monotonic()
            with suppress(AgentException, RedisError):
                await report(opened, agents, leases, app)
                if announced != (connects := connection.connects):
                    for agent in agents:
                        await opened.configs.restore(agent.config)
                    announced = connects
        await asyncio.sleep(min(every, CHANGE_SECONDS))


async def report(opened: Store, agents: Sequence[Agent], leases: Leases, app: Celery) -> None:
    """Report once. Raises `StoreError`."""
    now = await opened.connection.now()
    state = {
        "schema": REPORT_SCHEMA,
        "name": leases.worker,
        "held": len(leases),
        "slots": leases.slots() if leases.slots else 0,
        "agents": sorted(agent.name for agent in agents),
        # Remote control may add queues later.
        "queues": sorted(app.amqp.queues.consume_from),
        "tool_queues": sorted({queue for agent in agents for queue in agent.queues}),
        "stopping": leases.draining,
        "version": own_version(),
        "rss_bytes": memory_in_use(),
        "started_at": (now - timedelta(seconds=time.monotonic() - STARTED)).isoformat(),
        "seen": now.timestamp(),
    }
    shown = orjson.dumps(state).decode()
    await opened.connection.execute("HSET", opened.keys.of(keys.WORKERS), process_name(), shown)


@cache
def own_version() -> str:
    """Return the version of stepfleet here; empty where it is not installed as a package."""
    with suppress(metadata.PackageNotFoundError):
        return metadata.version("stepfleet")
    return ""


def memory_in_use() -> int | None:
    """Return the bytes of memory that this process uses; None where the system does not tell."""
    try:
        pages = Path("/proc/self/statm").read_text("ascii").split()[1]
    except OSError:
        return None
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


async def keep_records(store: Store) -> None:
    """Remove what the fleet's records do not need any more."""

    async def look() -> None:
        await forget_workers(store)
        if gone := await store.configs.forget_unused(store.settings.retention):
            log.info("forgot %d configurations that no run refers to", gone)

    await asyncio.sleep(FIRST_SECONDS)
    while True:
        await _attempt("the housekeeping of records", look)
        await asyncio.sleep(PAUSE_SECONDS)


async def keep_batches(store: Store, ended: asyncio.Event) -> None:
    """Look after batches as wholes, and after the lists of runs; at once where one has `ended`."""
    upkeep, lists, follow_ups = store.upkeep, store.lists, FollowUps(store)
    try:
        while True:
            # While some wait for the end of others, ends are noticed sooner.
            pause = FOLLOW_SECONDS if follow_ups.wait else LOOK_SECONDS
            spread = 0.8 + 0.4 * random.random()  # noqa: S311 - spreads looks
            look_at = time.monotonic() + pause * spread
            while (left := look_at - time.monotonic()) > 0 and await _is_set(ended, left):
                await _attempt("the end of a batch", partial(follow_ups.follow, upkeep))
                await asyncio.sleep(ENDED_SECONDS)
            await _attempt("the housekeeping of batches", partial(upkeep.look, pause))
            await _attempt("the search for batches that follow others", follow_ups.look)
            await _attempt("the housekeeping of lists of runs", lists.look)
    finally:
        await follow_ups.aclose()


async def _is_set(event: asyncio.Event, seconds: float) -> bool:
    """Wait up to `seconds` for the event, then clear it; return whether it was set."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
            event.clear()
            return True
    return False


async def keep_schedules(store: Store) -> None:
    """Submit the batches of schedules at their times, each beside the others."""
    schedules = store.schedules
    tasks: dict[str, asyncio.Task[None]] = {}

    async def look() -> None:
        ready, pause[0] = await schedules.due()
        for name in ready:
            if name not in tasks and len(tasks) < MOST_SCHEDULES:
                tasks[name] = asyncio.create_task(
                    _attempt(f"schedule {name!r}", partial(tick, name))
                )

    async def tick(name: str) -> None:
        # Of the client's side: workers that meet no schedule do not import it.
        from stepfleet.orchestrator.batches.scheduling import Scheduling  # noqa: PLC0415

        await Scheduling(store).look(name)

    pause: list[float | None] = [None]
    try:
        while True:
            wait = min(SCHEDULE_SECONDS, SCHEDULE_SECONDS if pause[0] is None else pause[0])
            # While some are being submitted others may be due.
            wait = BUSY_SECONDS if tasks else max(wait, 0.0)
            await asyncio.sleep(wait * (0.8 + 0.4 * random.random()))  # noqa: S311 - spreads looks
            for name in [name for name, task in tasks.items() if task.done()]:
                del tasks[name]
            await _attempt("the search for schedules", look)
    finally:
        await end_tasks(list(tasks.values()))


class FollowUps:
    """Submits the batches that follow others, beside all else; `wait`: there may be some."""

    def __init__(self, store: Store) -> None:
        self.wait = True
        self._store = store
        self._index = store.follow_ups
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def look(self) -> None:
        """Begin to submit those that are due. Raises `StoreError`."""
        due, self.wait = await self._index.due()
        self._tasks = {one: task for one, task in self._tasks.items() if not task.done()}
        for batch_id in due:
            if batch_id not in self._tasks and len(self._tasks) < MOST_FOLLOW_UPS:
                self._tasks[batch_id] = asyncio.create_task(self._submit(batch_id))

    async def follow(self, upkeep: BatchUpkeep) -> None:
        """Do that at once for a batch that has just ended, if any wait. Raises `StoreError`."""
        _, self.wait = await self._index.due()
        if self.wait:
            await upkeep.settle_all()
            await self.look()

    async def _submit(self, batch_id: str) -> None:
        # Of the client's side: workers that meet no such batch do not import it.
        from stepfleet.orchestrator.batches.following import FollowUpSubmission  # noqa: PLC0415

        following = FollowUpSubmission(self._store)
        await _attempt(f"batch {batch_id}", partial(following.look, batch_id))

    async def aclose(self) -> None:
        """Leave what is not submitted to other workers."""
        await end_tasks(self._tasks.values())


async def _attempt(what: str, look: Callable[[], Awaitable[object]]) -> None:
    """Look once; errors are logged, and the next turn tries again."""
    try:
        await look()
    except (AgentException, RedisError, OSError) as error:
        log.warning("%s is put off: %s", what, error)
    except Exception:
        log.exception("%s failed", what)
