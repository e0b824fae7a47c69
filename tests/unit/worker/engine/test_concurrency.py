"""Steps that have their answers wait while enough others are at work."""

import asyncio

import pytest
from support.deadlines import until

from stepfleet.worker.engine.concurrency import ConcurrencyLimiter

LONG = 60.0
ENDLESS = 3600.0


class Steps:
    """So many steps that wait for an answer."""

    def __init__(self, pacing: ConcurrencyLimiter, count: int) -> None:
        self.pacing = pacing
        self.answered = asyncio.Event()
        self.ended = [asyncio.Event() for _ in range(count)]
        self.went: list[int] = []
        self.tasks = [asyncio.ensure_future(self._step(number)) for number in range(count)]

    async def _step(self, number: int) -> None:
        with self.pacing:
            async with self.pacing.elsewhere:
                await self.answered.wait()
            self.went.append(number)
            await self.ended[number].wait()

    async def until(self, at_work: int, waiting: int) -> None:
        async def reached() -> bool:
            return (self.pacing.at_work, self.pacing.waiting) == (at_work, waiting)

        await until(reached, within=LONG)

    async def end(self) -> None:
        for ended in self.ended:
            ended.set()
        await asyncio.wait_for(asyncio.gather(*self.tasks, return_exceptions=True), LONG)


async def test_answers_are_taken_up_in_order_a_few_at_a_time() -> None:
    steps = Steps(ConcurrencyLimiter(most=2, stuck=ENDLESS), 5)
    await steps.until(at_work=0, waiting=0)
    steps.answered.set()
    await steps.until(at_work=2, waiting=3)
    assert steps.went == [0, 1]
    steps.ended[0].set()
    await steps.until(at_work=2, waiting=2)
    assert steps.went == [0, 1, 2]
    await steps.end()
    assert steps.went == [0, 1, 2, 3, 4]
    assert steps.pacing.at_work == 0


async def test_a_step_that_begins_never_waits_and_goes_before_answers() -> None:
    pacing = ConcurrencyLimiter(most=1, stuck=ENDLESS)
    steps = Steps(pacing, 1)
    await steps.until(at_work=0, waiting=0)
    with pacing, pacing:
        steps.answered.set()
        await steps.until(at_work=2, waiting=1)
    await steps.until(at_work=1, waiting=0)
    await steps.end()
    assert steps.went == [0]


@pytest.mark.parametrize("had_its_turn", [False, True])
async def test_whoever_is_broken_off_leaves_its_place(had_its_turn: bool) -> None:
    steps = Steps(ConcurrencyLimiter(most=1, stuck=ENDLESS), 3)
    await steps.until(at_work=0, waiting=0)
    steps.answered.set()
    await steps.until(at_work=1, waiting=2)
    if had_its_turn:
        steps.ended[0].set()
        await steps.until(at_work=1, waiting=1)
    steps.tasks[1].cancel()
    await steps.until(at_work=1, waiting=0 if had_its_turn else 1)
    await steps.end()
    assert steps.went[-1] == 2
    assert steps.pacing.at_work == 0


async def test_a_call_that_fails_does_not_wait_to_say_so() -> None:
    pacing = ConcurrencyLimiter(most=1, stuck=ENDLESS)
    with pacing:
        with pytest.raises(ValueError, match="no answer"), pacing:
            async with pacing.elsewhere:
                raise ValueError("no answer")
        assert pacing.at_work == 1


async def test_where_nobody_ends_its_work_others_are_let_in_all_the_same() -> None:
    """Redis may be away, or one master of a cluster: the others have work to do."""
    steps = Steps(ConcurrencyLimiter(most=2, stuck=0.05), 5)
    await steps.until(at_work=0, waiting=0)
    steps.answered.set()
    await steps.until(at_work=5, waiting=0)
    await steps.end()
    assert steps.pacing.at_work == 0


async def test_steps_that_are_stuck_hold_nobody_up_while_others_come_and_go() -> None:
    """One master of a cluster is away: the steps of the others are not held up by its own."""
    pacing = ConcurrencyLimiter(most=2, stuck=0.05)

    async def come_and_go() -> None:
        while True:
            with pacing:
                await asyncio.sleep(0.005)  # the pace of steps that come and go

    with pacing, pacing:
        others = asyncio.ensure_future(come_and_go())
        steps = Steps(pacing, 6)
        steps.answered.set()
        for ended in steps.ended:
            ended.set()
        await asyncio.wait_for(asyncio.gather(*steps.tasks), LONG)
        others.cancel()
        await asyncio.wait([others])
        assert pacing.at_work == 2
    assert steps.went == [0, 1, 2, 3, 4, 5]


async def test_after_a_wait_aside_nobody_waits() -> None:
    pacing = ConcurrencyLimiter(most=1, stuck=ENDLESS)
    with pacing, pacing:
        with pacing.aside:
            assert pacing.at_work == 1
        assert pacing.at_work == 2


@pytest.mark.parametrize("turns", [1, 2, 3, 4])
async def test_whoever_is_broken_off_at_a_boundary_is_counted_until_its_end(turns: int) -> None:
    """Before the wait, in it, and as it is over: whatever turn of the loop that is."""
    pacing = ConcurrencyLimiter(most=2)
    seen: list[int] = []

    async def step() -> None:
        with pacing:
            try:
                async with pacing.elsewhere:
                    await asyncio.sleep(0)
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                seen.append(pacing.at_work)
                raise

    task = asyncio.create_task(step())
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == [1]
    assert pacing.at_work == 0
