import asyncio

import pytest

from stepfleet.worker.toolbox import execute_in_order


async def test_in_order_the_calls_take_turns() -> None:
    """TOOL-14: off, the times add up."""
    seen: list[str] = []

    async def alone(index: int, call: str) -> str:
        seen.append(f"{call} begins")
        for _ in range(10):
            await asyncio.sleep(0)
        seen.append(f"{call} ends")
        return f"{index}{call}"

    assert await execute_in_order("abc", alone, parallel=False) == ("0a", "1b", "2c")
    assert seen == [f"{call} {what}" for call in "abc" for what in ("begins", "ends")]


async def test_in_parallel_they_overlap_and_results_keep_the_order_of_the_calls() -> None:
    """TOOL-14: on, the longest counts."""
    all_run, ended = asyncio.Barrier(3), list[str]()

    async def together(index: int, call: str) -> str:
        await all_run.wait()
        for _ in range(10 * (3 - index)):
            await asyncio.sleep(0)
        ended.append(call)
        return f"{index}{call}"

    async with asyncio.timeout(60):
        results = await execute_in_order("abc", together, parallel=True)
    assert (results, ended) == (("0a", "1b", "2c"), ["c", "b", "a"])


@pytest.mark.parametrize("parallel", [True, False])
async def test_no_calls_give_no_results(parallel: bool) -> None:
    """TOOL-14"""

    async def never(_: int, call: str) -> str:
        raise AssertionError(call)

    assert await execute_in_order("", never, parallel=parallel) == ()


async def test_a_broken_store_cancels_the_others_and_is_raised_as_it_is() -> None:
    """TOOL-15: what is no tool trouble ends the turn."""
    cancelled = asyncio.Event()

    async def fail(index: int, _: str) -> None:
        if index == 1:
            raise ConnectionError("store")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with pytest.raises(ConnectionError, match="store"):
        await execute_in_order("ab", fail, parallel=True)
    assert cancelled.is_set()
