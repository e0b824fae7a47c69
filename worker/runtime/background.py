"""Looks after records, batches and schedules beside a worker's steps, never in their way."""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from functools import partial

from redis.exceptions import RedisError

from stepfleet.orchestrator.errors import AgentException
from stepfleet.orchestrator.store.batches.upkeep import LOOK_SECONDS, BatchUpkeep
from stepfleet.orchestrator.store.fleet.overview import forget_workers
from stepfleet.orchestrator.store.store import Store
from stepfleet.worker.engine.bridge import end_tasks

log = logging.getLogger(__name__)

FIRST_SECONDS = 60.0
"""A worker that has just started has better things to do than housekeeping."""
PAUSE_SECONDS = 3600.0
SCHEDULE_SECONDS = 5.0
"""How often workers look for schedules, unless one is to come sooner."""
BUSY_SECONDS = 0.25
"""The same while some are being submitted."""
MOST_SCHEDULES = 8
"""Schedules that one worker submits at once."""
ARCHIVE_SECONDS = 10.0
"""How often a process looks for runs to archive: one trip where another is at it."""
FOLLOW_SECONDS = 1.0
"""How often a worker looks after batches while some are to follow others."""
ENDED_SECONDS = 0.1
"""How soon after the end of one batch a worker follows the end of another one."""
MOST_FOLLOW_UPS = 4
"""Batches that a worker submits at once."""


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
    submissions, schedules = Submissions("schedule {!r}", MOST_SCHEDULES), store.schedules
    pause: float | None = None

    async def look() -> None:
        nonlocal pause
        ready, pause = await schedules.due()
        submissions.begin(ready, tick)

    async def tick(name: str) -> None:
        # Of the client's side: workers that meet no schedule do not import it.
        from stepfleet.orchestrator.batches.scheduling import Scheduling  # noqa: PLC0415

        await Scheduling(store).look(name)

    try:
        while True:
            wait = min(SCHEDULE_SECONDS, SCHEDULE_SECONDS if pause is None else pause)
            # While some are being submitted others may be due.
            busy = not all(one.done() for one in submissions.tasks.values())
            wait = BUSY_SECONDS if busy else max(wait, 0.0)
            await asyncio.sleep(wait * (0.8 + 0.4 * random.random()))  # noqa: S311 - spreads looks
            await _attempt("the search for schedules", look)
    finally:
        await end_tasks(submissions.tasks.values())


async def keep_archive(store: Store) -> None:
    """Move ended runs to the archive as they are due; one process of a fleet at a time does."""

    async def look() -> None:
        while (moved := await store.archiving.look()).runs:
            log.info("archived %d runs in %d bytes", moved.runs, moved.bytes)

    while True:
        await asyncio.sleep(ARCHIVE_SECONDS * (0.8 + 0.4 * random.random()))  # noqa: S311 - spreads
        await _attempt("the archive", look)


class FollowUps:
    """Submits the batches that follow others, beside all else; `wait`: there may be some."""

    def __init__(self, store: Store) -> None:
        self.wait = True
        self._store = store
        self._index = store.follow_ups
        self._submissions = Submissions("batch {}", MOST_FOLLOW_UPS)

    async def look(self) -> None:
        """Begin to submit those that are due. Raises `StoreError`."""
        due, self.wait = await self._index.due()
        self._submissions.begin(due, self._submit)

    async def follow(self, upkeep: BatchUpkeep) -> None:
        """Do that at once for a batch that has just ended, if any wait. Raises `StoreError`."""
        _, self.wait = await self._index.due()
        if self.wait:
            await upkeep.settle_all()
            await self.look()

    async def _submit(self, batch_id: str) -> None:
        # Of the client's side: workers that meet no such batch do not import it.
        from stepfleet.orchestrator.batches.following import FollowUpSubmission  # noqa: PLC0415

        await FollowUpSubmission(self._store).look(batch_id)

    async def aclose(self) -> None:
        """Leave what is not submitted to other workers."""
        await end_tasks(self._submissions.tasks.values())


class Submissions:
    """At most `most` submissions by name, each beside all else; `called` words them for the log."""

    def __init__(self, called: str, most: int) -> None:
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._called = called
        self._most = most

    def begin(self, names: Iterable[str], submit: Callable[[str], Awaitable[object]]) -> None:
        """Begin those that have not begun, as far as there is room."""
        self.tasks = {one: task for one, task in self.tasks.items() if not task.done()}
        for name in names:
            if name not in self.tasks and len(self.tasks) < self._most:
                work = _attempt(self._called.format(name), partial(submit, name))
                self.tasks[name] = asyncio.create_task(work)


async def _attempt(what: str, look: Callable[[], Awaitable[object]]) -> None:
    """Look once; errors are logged, and the next turn tries again."""
    try:
        await look()
    except (AgentException, RedisError, OSError) as error:
        log.warning("%s is put off: %s", what, error)
    except Exception:
        log.exception("%s failed", what)
