import asyncio
import time

import pytest

from stepfleet.worker.toolbox import execute_in_order


async def slow(index: int, call: str) -> str:
    await asyncio.sleep(0.3 - 0.05 * index)
    return f"{index}{call}"


async def test_in_order_the_calls_take_turns() -> None:
    """TOOL-14: off, the times add up."""
    begun = time.monotonic()
    assert await execute_in_order("abc", slow, parallel=False) == ("0a", "1b", "2c")
    assert time.monotonic() - begun >= 0.75


async def test_in_parallel_they_overlap_and_results_keep_the_order_of_the_calls() -> None:
    """TOOL-14: on, the longest counts."""
    begun = time.monotonic()
    assert await execute_in_order("abc", slow, parallel=True) == ("0a", "1b", "2c")
    assert time.monotonic() - begun < 0.6


@pytest.mark.parametrize("parallel", [True, False])
async def test_no_calls_give_no_results(parallel: bool) -> None:
    """TOOL-14"""
    assert await execute_in_order("", slow, parallel=parallel) == ()


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
