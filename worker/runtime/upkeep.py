"""What looks after a fleet beside its steps: workers do it too, and a keeper does nothing else.

Leases and turns in Redis make any number of them safe. Nothing here knows an agent's code: runs
that wait for it are dispatched, and a worker goes on with them.
"""

import asyncio
import os
import random
import socket
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import orjson

from stepfleet.orchestrator.errors import AgentException
from stepfleet.orchestrator.store.fleet.overview import REPORT_SCHEMA
from stepfleet.orchestrator.store.store import Store
from stepfleet.orchestrator.version import own_build
from stepfleet.worker.events.delivery import EventDelivery
from stepfleet.worker.events.subscribers import deliveries
from stepfleet.worker.leases.lease import Leases
from stepfleet.worker.leases.renewal import RENEWALS_PER_LEASE
from stepfleet.worker.runtime.admission.gate import Gate
from stepfleet.worker.runtime.admission.ticker import Ticker
from stepfleet.worker.runtime.background import (
    keep_archive,
    keep_batches,
    keep_records,
    keep_schedules,
)
from stepfleet.worker.runtime.circuits import CircuitBreaker
from stepfleet.worker.runtime.links import LinkedRuns
from stepfleet.worker.runtime.rescuer import Rescuer, StoreClock

STARTED = time.monotonic()
"""When this process began."""
LONG_PER_SLOT = 10
"""A queue with more messages per slot than this is long: they need not be published again."""


class Upkeep:
    """The rescuer, schedules, batches, records, limits, circuits and deliveries of one process.

    `leases` has the steps that this process executes, none in a keeper. `gate` and `circuits` (None
    where the settings want none) are also those of its steps; `batch_ended` is set where the last
    run of a batch has ended here.
    """

    def __init__(self, store: Store, leases: Leases, slots: int) -> None:
        settings = store.settings
        self.store = store
        self.batch_ended = asyncio.Event()
        self.linked = LinkedRuns(store)
        self.gate = Gate(store, f"{process_name()}:{id(self):x}")
        self.ticker = Ticker(store, self.gate, leases)
        self.circuits: CircuitBreaker | None = None
        if settings.circuit_after:
            self.circuits = CircuitBreaker(store.circuits, settings.circuit_after)
        self.sinks: list[EventDelivery] = []
        self._rescuer = self._make_rescuer()
        self.note_slots(slots)

    @classmethod
    @asynccontextmanager
    async def open(
        cls, store: Store, leases: Leases, slots: int, *, delivers: bool = True
    ) -> AsyncGenerator[Self]:
        """Give an upkeep whose sinks are open where it `delivers`. Raises `StoreError`."""
        made = cls(store, leases, slots)
        if delivers:
            made.sinks = await deliveries(store, process_name(), random.random)
        try:
            yield made
        finally:
            for sink in made.sinks:
                await sink.aclose()

    def note_slots(self, slots: int) -> None:
        """Note how many steps can be done at once: what a long queue is depends on it."""
        most = self.store.settings.slots
        self._rescuer.long_queue = min(most, LONG_PER_SLOT * max(slots, 1))

    def watches(
        self, rescued: Callable[[int], None]
    ) -> Iterator[tuple[Coroutine[Any, Any, None], str | None]]:
        """Return what runs until it is cancelled, each with a name.

        `rescued` receives how many runs were dispatched again.
        """
        store = self.store
        yield self.ticker.watch(), "stepfleet-limits"
        yield self._rescuer.watch(store.crash, rescued), "stepfleet-rescuer"
        yield keep_records(store), "stepfleet-records"
        yield keep_batches(store, self.batch_ended), "stepfleet-batches"
        yield keep_schedules(store), "stepfleet-schedules"
        if store.settings.archive_url:
            yield keep_archive(store), "stepfleet-archive"
        for sink in self.sinks:
            yield sink.watch(), None
        if self.circuits:
            yield self.circuits.watch(store.settings.rescue_interval), "stepfleet-circuits"

    def _make_rescuer(self) -> Rescuer:
        store, settings = self.store, self.store.settings
        calm = settings.lease / RENEWALS_PER_LEASE
        return Rescuer(
            *(store.connection, store.keys, store.dispatch),
            grace=settings.grace,
            interval=settings.rescue_interval,
            long_queue=settings.slots,
            jitter=random.random,
            calm=calm,
            clock=StoreClock(calm),
            settle=self.linked.settle,
            lines=self.gate,
        )


async def report(store: Store, key: str, **state: object) -> None:
    """Report in the hash `key` that this process lives, and its `state`. Raises `StoreError`."""
    now, build = await store.connection.now(), own_build()
    common = {
        "schema": REPORT_SCHEMA,
        "name": store.worker,
        "version": build.version,
        "commit": build.commit,
        "release": store.settings.release,
        "rss_bytes": memory_in_use(),
        "started_at": (now - timedelta(seconds=time.monotonic() - STARTED)).isoformat(),
        "seen": now.timestamp(),
    }
    shown = orjson.dumps({**common, **state}).decode()
    await store.connection.execute("HSET", store.keys.of(key), process_name(), shown)


async def sign_off(store: Store, key: str) -> None:
    """Remove this process's report from the hash `key`, if Redis answers."""
    with suppress(AgentException):
        await store.connection.execute("HDEL", store.keys.of(key), process_name())


def process_name() -> str:
    """Return the name of this process among all of the fleet: host and process id."""
    return f"{socket.gethostname()}:{os.getpid()}"


def memory_in_use() -> int | None:
    """Return the bytes of memory that this process uses; None where the system does not tell."""
    try:
        pages = Path("/proc/self/statm").read_text("ascii").split()[1]
    except OSError:
        return None
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
