"""Renews the leases of this process: in rounds, and at once where a lease looks lapsed.

While the event loop is blocked, a thread renews them: without it every lease lapses, and other
workers pay for the same calls again.
"""

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import Self

from celery import Celery

from stepfleet.orchestrator.errors import AgentException
from stepfleet.orchestrator.protocol.claim import Held
from stepfleet.orchestrator.protocol.waiting import TakenCall
from stepfleet.orchestrator.settings.settings import Settings
from stepfleet.orchestrator.store.runs.steps import StepStore
from stepfleet.orchestrator.store.store import Store, open_store
from stepfleet.worker.leases.lease import Lease, Leases, Renew

log = logging.getLogger(__name__)

RENEWALS_PER_LEASE = 3
LOOKS_PER_LEASE = 6
LATE_SHARE = 0.5
"""The loop renews each third of a lease; after so much of one without a round it is blocked."""
TOGETHER = 100
"""Renewals in flight at a time."""
FRAMES = 12
"""Frames of the blocked thread's stack that are logged, the innermost."""
JOIN_SECONDS = 2.0

Connect = Callable[[], AbstractAsyncContextManager[Renew]]


def renewing(store: StepStore) -> Renew:
    """Return what renews a lease by `store`. Raises `StoreError` when Redis stays out of reach."""

    async def renew(lease: Lease) -> Held:
        work = lease.work
        if isinstance(work, TakenCall):
            return await store.calls.keep(work.hint, work.token, lease.seconds)
        return await store.journal(work, lease.seconds)

    return renew


def connecting(settings: Settings, app: Celery) -> Connect:
    """Return what opens a connection of its own for renewals, and closes it."""
    quick = settings.model_copy(
        update={"patience": settings.lease / LOOKS_PER_LEASE, "connections": 1}
    )

    @asynccontextmanager
    async def connect() -> AsyncIterator[Renew]:
        async with aclosing(await open_store(quick, app)) as opened:
            yield renewing(opened.steps)

    return connect


class Standby:
    """Watches over one event loop's rounds, and renews in its place; made in that loop's thread.

    A tool that runs in the loop, or a library that computes there, keeps the loop's own renewals
    from going out. The thread only checks a clock until the loop is late. Then it opens a
    connection of its own, renews all leases, and logs the stack that blocks the loop: nothing is
    lost yet. After `limit` seconds it stops, which is an error: the runs may be taken over then.
    Code that keeps Python's interpreter lock blocks this thread, too.
    """

    def __init__(self, leases: Leases, connect: Connect, *, lease: float, limit: float) -> None:
        self._leases = leases
        self._connect = connect
        self._lease = lease
        self._limit = limit
        self._loop = asyncio.get_running_loop()
        self._blocked = threading.get_ident()
        self._seen = time.monotonic()
        self._left_at = 0.0
        self._turns = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stepfleet-standby", daemon=True)

    def start(self) -> None:
        """Begin to look; nothing where the limit is 0."""
        if self._limit:
            self._thread.start()

    def seen(self) -> None:
        """Note that the loop has renewed, or could have."""
        self._seen = time.monotonic()

    async def aclose(self) -> None:
        """End the thread."""
        self._ended.set()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, JOIN_SECONDS)

    @property
    def _late(self) -> float:
        """Seconds since the loop's last round, where that is too long ago; else 0."""
        silent = time.monotonic() - self._seen
        return silent if silent > self._lease * LATE_SHARE else 0.0

    def _watch(self) -> None:
        while not self._ended.wait(self._lease / LOOKS_PER_LEASE):
            if not self._late or self._left_at == self._seen or not self._leases:
                continue
            try:
                asyncio.run(self._renew_while_late())
            except (AgentException, OSError) as error:
                log.error("the leases of a blocked event loop cannot be renewed: %s", error)  # noqa: TRY400 - a matter of Redis, not of this code
            except Exception:
                log.exception("the leases of a blocked event loop cannot be renewed")

    async def _renew_while_late(self) -> None:
        log.warning(
            "the event loop has had no turn for %.1f s, and with it %d steps and tool calls; their"
            " leases are renewed from another thread, for %g s at most. Run tools that compute or"
            " block in a thread (the default of plain functions) or on a queue of their own. If the"
            " stack below ends in a selector, the machine is overloaded:\n%s",
            self._late,
            len(self._leases),
            self._limit,
            self._where(),
        )
        async with self._connect() as renew:
            while not self._ended.is_set() and (late := self._late):
                if late > self._limit:
                    self._left_at = self._seen
                    log.error(
                        "the event loop has been blocked for %.1f s; its leases are left,"
                        " and other workers may take its runs over:\n%s",
                        late,
                        self._where(),
                    )
                    return
                await self._round(renew)
                await asyncio.sleep(self._lease / LOOKS_PER_LEASE)
        if not self._ended.is_set():
            log.info("the event loop runs again, and renews its leases itself")

    async def _round(self, renew: Renew) -> None:
        """Renew all. If a part of Redis is away, only its own leases fail, and occupy slots.

        The next round begins elsewhere, so that no lease is behind those each time. Raises a
        lease's error where none can be renewed.
        """
        held = list(self._leases)
        first = self._turns * TOGETHER % len(held) if held else 0
        self._turns += 1
        slots = asyncio.Semaphore(TOGETHER)
        failed = await asyncio.gather(
            *(self._renew(one, renew, slots) for one in held[first:] + held[:first])
        )
        if failed and all(failed) and failed[0]:
            raise failed[0]

    async def _renew(
        self, lease: Lease, renew: Renew, slots: asyncio.Semaphore
    ) -> AgentException | OSError | None:
        """Renew one lease; return its error. The loop applies the answer when it works again."""
        async with slots:
            try:
                held = await renew(lease)
            except (AgentException, OSError) as error:
                return error
        if not self._ended.is_set():
            self._loop.call_soon_threadsafe(lease.apply, held)
        return None

    def _where(self) -> str:
        frame = sys._current_frames().get(self._blocked)  # noqa: SLF001 - the documented way
        stack = traceback.format_stack(frame)[-FRAMES:] if frame else ["unknown\n"]
        return "".join(stack).rstrip()


class Renewal:
    """Renews `leases` by `renew`, each three times in `lease` seconds.

    While the event loop is blocked, `standby` does.
    """

    def __init__(
        self, leases: Leases, renew: Renew, lease: float, standby: Standby | None = None
    ) -> None:
        self._leases = leases
        self.once = renew
        self._standby = standby
        self._pause = lease / RENEWALS_PER_LEASE

    @classmethod
    def over(cls, opened: Store, leases: Leases, app: Celery | None) -> Self:
        """Return the renewal of the running loop; with an `app`, a thread stands by for it."""
        settings, standby = opened.settings, None
        if app is not None:
            connect = connecting(settings, app)
            standby = Standby(leases, connect, lease=settings.lease, limit=settings.blocked_limit)
        return cls(leases, renewing(opened.steps), settings.lease, standby)

    async def watch(self) -> None:
        """Renew until cancelled."""
        try:
            if self._standby:
                self._standby.start()
            while True:
                await asyncio.sleep(self._pause)
                if self._standby:
                    self._standby.seen()
                await self._leases.renew(self.once)
        finally:
            if self._standby:
                await self._standby.aclose()

    async def renew(self, run_id: str, batch_id: str = "") -> None:
        """Renew the leases of a run, or of a batch (and of all tool calls), at once."""
        held: Iterable[Lease] = self._leases.of(run_id)
        if batch_id:
            held = [
                lease
                for lease in self._leases
                if isinstance(lease.work, TakenCall) or lease.work.batch_id == batch_id
            ]
        await self._leases.renew(self.once, held)
