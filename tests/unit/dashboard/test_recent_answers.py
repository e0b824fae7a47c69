"""Answers that are costly are read once for all who want them within some seconds."""

import asyncio

import pytest

from stepfleet.orchestrator.dashboard.api.handling import Recent


class Reads:
    """Counts what was read; each waits until it may go on."""

    def __init__(self) -> None:
        self.number = 0
        self.may_end = asyncio.Event()

    async def __call__(self) -> int:
        self.number += 1
        number = self.number
        await self.may_end.wait()
        if number == 1:
            raise ValueError("the first one fails")
        return number


async def test_all_who_ask_at_once_have_one_answer_and_errors_are_not_kept() -> None:
    reads, recent = Reads(), Recent[int](60.0)
    reads.may_end.set()
    both = (recent.get("a", reads), recent.get("a", reads))
    assert [str(one) for one in await asyncio.gather(*both, return_exceptions=True)] == [
        "the first one fails"
    ] * 2
    assert await recent.get("a", reads) == await recent.get("a", reads) == 2


async def test_who_gives_up_takes_nothing_from_the_others() -> None:
    reads, recent = Reads(), Recent[int](60.0)
    reads.number = 1
    hasty = asyncio.ensure_future(recent.get("a", reads))
    patient = asyncio.ensure_future(recent.get("a", reads))
    await asyncio.sleep(0)
    hasty.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hasty
    reads.may_end.set()
    assert await patient == 2


async def test_old_answers_are_read_again_and_only_some_are_kept() -> None:
    reads, kept = Reads(), Recent[int](60.0, most=2)
    reads.number = 1
    reads.may_end.set()
    assert [await kept.get(key, reads) for key in ("a", "b", "b", "c", "b", "a")] == [
        2,
        3,
        3,
        4,
        3,
        5,
    ]
    old = Recent[int](-1.0)
    assert await old.get("a", reads) != await old.get("a", reads)
