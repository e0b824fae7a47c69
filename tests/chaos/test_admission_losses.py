"""Whatever is lost around the limits, every run has its turn, and nothing stays reserved.

Hints, commits, workers, keys of the limits and Redis's newest writes are lost at random, while
people change the limits.
"""

import asyncio
import os
import random

import pytest
from support.chaos.admission import (
    BATCH,
    GRACE,
    LEASE,
    MODEL,
    Losses,
    UnluckyWorker,
    strikes,
)
from support.deadlines import until
from support.runs.stored_runs import bench

from stepfleet.orchestrator.store import keys
from stepfleet.worker.runtime.admission import ticker

RUNS = 10
MANY = int(os.environ.get("CHAOS_ROUNDS", "30"))


async def play(url: str, seed: int, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LINES_SECONDS", "LINES_SECONDS_ACTIVE"):
        monkeypatch.setattr(ticker, name, 0.5)
    draw = random.Random(seed)
    async with bench(url, lease=LEASE, grace=GRACE, patience=1.0) as desk:
        workers = [UnluckyWorker(desk, f"w{n}", draw) for n in range(2)]
        first = workers[0].gate.settings
        await first.change(MODEL, {"in_flight": 2, "requests_per_minute": 600, "burst": 0.5})
        runs = [await desk.create() for _ in range(RUNS)]
        tasks = [asyncio.create_task(one()) for w in workers for one in (w.work, w.tick)]
        with Losses(url, draw) as losses:
            until_then = asyncio.get_running_loop().time() + seconds
            while asyncio.get_running_loop().time() < until_then:
                await asyncio.sleep(draw.uniform(0.05, 0.4))  # the pace of the events
                await strikes(draw.choice(workers), losses, draw)
            for worker in workers:
                worker.loses = False
            await first.clear([BATCH])
            await first.change(MODEL, {"in_flight": 3, "requests_per_minute": 6000})

            async def all_ended() -> bool:
                dues = [await desk.due(run_id) for run_id in runs]
                return not any(dues)

            async def nothing_left() -> bool:
                return not (losses.numbers(keys.LIMIT_WAITING) or losses.numbers(keys.LIMIT_GRANTS))

            await until(all_ended, within=40, what=f"the end of all runs (seed {seed})")
            await until(nothing_left, within=20, what=f"an end of all grants (seed {seed})")
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(one, asyncio.CancelledError) for one in ended), ended


async def test_runs_under_limits_end_whatever_is_lost(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DIST-12: small, in the gate."""
    await play(redis_url, 1, 3.0, monkeypatch)


@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(2, MANY + 2))
async def test_runs_under_limits_end_whatever_is_lost_at_length(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """DIST-12: the same again and again."""
    await play(redis_url, seed, 6.0, monkeypatch)
