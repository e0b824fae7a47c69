"""The standby thread: a lease that cannot be renewed leaves the others alone."""

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from stepfleet.orchestrator import StoreError
from stepfleet.orchestrator.protocol.claim import Held
from stepfleet.worker.leases.lease import Lease
from stepfleet.worker.leases.renewal import TOGETHER, Standby

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

    async def __call__(self, lease: Numbered) -> Held:
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
    standby = Standby(cast("Any", leases), connect, lease=0.3, limit=600.0)
    standby.start()
    try:
        reached = half.reached_all.wait(60)
    finally:
        await standby.aclose()
    await asyncio.sleep(0)
    assert reached, half.renewed.most_common()[-3:]


async def test_a_blocked_loop_is_a_warning_and_an_error_where_its_leases_are_left(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Who watches for errors hears of what may cost a call, and of nothing else."""
    caplog.set_level(logging.INFO)
    half, left = HalfAway(), threading.Event()

    class Left(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            if "are left" in record.getMessage():
                left.set()
            return True

    @asynccontextmanager
    async def connect() -> AsyncIterator[Any]:
        yield half

    leases = [Numbered(number) for number in range(AWAY)]
    standby = Standby(cast("Any", leases), connect, lease=0.3, limit=0.6)
    watched, noticed = logging.getLogger("stepfleet.worker.leases.renewal"), Left()
    watched.addFilter(noticed)
    standby.start()
    try:
        assert left.wait(60)
    finally:
        watched.removeFilter(noticed)
        await standby.aclose()
    said = [(one.levelname, one.getMessage()) for one in caplog.records if one.name == watched.name]
    assert said[0][0] == "WARNING"
    assert "has had no turn for" in said[0][1]
    assert "left.wait(60)" in said[0][1]
    assert said[1][0] == "ERROR"
