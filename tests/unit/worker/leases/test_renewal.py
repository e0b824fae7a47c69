"""Rounds of renewals, some of which get no answer: what is on a part of Redis that is away."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pytest
from support.deadlines import until
from support.runs.seen_steps import a_claim

from stepfleet.orchestrator import ToolCall
from stepfleet.orchestrator.protocol.attempt import Interruption
from stepfleet.orchestrator.protocol.claim import Work
from stepfleet.orchestrator.protocol.waiting import TakenCall
from stepfleet.worker.leases.lease import Lease, Leases

LONG = 60.0


@dataclass(frozen=True)
class Answer:
    """What a renewal says."""

    ours: bool = True
    want: str = ""


OURS = Answer()


def name_of(lease: Lease) -> str:
    return lease.work.hint.run_id


@dataclass
class HalfAway:
    """Renews; what is named "away" waits until it is back."""

    back: asyncio.Event = field(default_factory=asyncio.Event)
    answer: Answer = OURS
    begun: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)

    async def renew(self, lease: Lease) -> Any:
        name = name_of(lease)
        self.begun[name] += 1
        if name != "away":
            return OURS
        try:
            await self.back.wait()
        except asyncio.CancelledError:
            self.dropped[name] += 1
            raise
        return self.answer


@dataclass
class Hands:
    """Leases, with one on each half."""

    leases: Leases
    away: Lease
    held: ExitStack

    async def round(self, redis: HalfAway) -> None:
        """Make a round of renewals, which must end."""
        async with asyncio.timeout(LONG):
            await self.leases.renew(redis.renew)


def taken(run_id: str) -> TakenCall:
    call = ToolCall(id="c", name="look", arguments={})
    return TakenCall(Work(run_id, 0, 0), "t", datetime.now(UTC), call, a_claim().config, 1)


@pytest.fixture(params=["steps", "calls"])
async def hands(request: pytest.FixtureRequest) -> AsyncIterator[Hands]:
    held, leases = ExitStack(), Leases(lambda: 0.0)
    made: list[Lease] = []
    for one in ("well", "away"):
        if request.param == "steps":
            made.append(held.enter_context(leases.hold(a_claim(run_id=one))))
        else:
            made.append(held.enter_context(leases.hold(taken(one))))
    for lease in made:
        lease.settle()
    with held:
        yield Hands(leases, made[1], held)


async def test_a_renewal_without_an_answer_holds_no_other_lease_up(hands: Hands) -> None:
    redis = HalfAway()
    for _ in range(3):
        await hands.round(redis)
    assert redis.begun == {"well": 3, "away": 1}


async def test_a_late_answer_is_applied_and_the_lease_renewed_again(hands: Hands) -> None:
    redis = HalfAway(answer=Answer(ours=False))
    await hands.round(redis)
    assert hands.away.interruption is None
    redis.back.set()

    async def is_applied() -> bool:
        return hands.away.interruption is Interruption.LEASE_LOST

    await until(is_applied, within=LONG)
    await hands.round(redis)
    assert redis.begun == {"well": 2, "away": 2}


async def test_nothing_is_left_of_a_renewal_when_its_lease_is_over(hands: Hands) -> None:
    redis = HalfAway()
    await hands.round(redis)
    hands.held.close()

    async def is_dropped() -> bool:
        return redis.dropped == {"away": 1}

    await until(is_dropped, within=LONG)


async def test_a_renewal_that_fails_is_tried_in_the_next_round(hands: Hands) -> None:
    tried = Counter[str]()

    async def fails(lease: Lease) -> Any:
        tried[name_of(lease)] += 1
        raise OSError("gone")

    for _ in range(2):
        async with asyncio.timeout(LONG):
            await hands.leases.renew(fails)
    assert tried == {"well": 2, "away": 2}
