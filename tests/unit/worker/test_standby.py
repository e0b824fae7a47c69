"""The standby thread: a lease that cannot be renewed leaves the others alone."""

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

from stepfleet.orchestrator.errors import StoreError
from stepfleet.orchestrator.store.steps import Held
from stepfleet.worker.leases import Lease
from stepfleet.worker.standby import TOGETHER, Standby

MANY = 2 * TOGETHER + 50
AWAY = 5
ROUNDS = 3


class Numbered(Lease):
    """A lease that its number tells from others."""

    def __init__(self, number: int) -> None:
        self.number = number


class HalfAway:
    """Renews every lease but one, whose part of Redis is away."""

    def __init__(self) -> None:
        self.renewed: Counter[int] = Counter()
        self.reached_all = threading.Event()

    async def step(self, lease: Numbered) -> Held:
        if lease.number == AWAY:
            msg = "that part is away"
            raise StoreError(msg)
        self.renewed[lease.number] += 1
        if len(self.renewed) == MANY - 1 and min(self.renewed.values()) >= ROUNDS:
            self.reached_all.set()
        return Held(ours=True)


async def test_a_lease_whose_shard_is_away_leaves_none_behind_it_unrenewed() -> None:
    half = HalfAway()

    @asynccontextmanager
    async def connect() -> AsyncIterator[Any]:
        yield half

    leases = [Numbered(number) for number in range(MANY)]
    standby = Standby(cast("Any", leases), cast("Any", []), connect, lease=0.3, limit=600.0)
    standby.start()
    try:
        reached = half.reached_all.wait(60)
    finally:
        await standby.aclose()
    await asyncio.sleep(0)
    assert reached, half.renewed.most_common()[-3:]
