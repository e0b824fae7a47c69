import asyncio

import pytest

from stepfleet.worker.toolbox import execute_at_once


async def test_in_parallel_they_overlap_and_results_keep_the_order_of_the_calls() -> None:
    """TOOL-14: on, the longest counts."""
    all_run, ended, order = asyncio.Barrier(3), list[str](), "abc"

    async def together(call: str) -> str:
        await all_run.wait()
        for _ in range(10 * (3 - order.index(call))):
            await asyncio.sleep(0)
        ended.append(call)
        return call.upper()

    async with asyncio.timeout(60):
        results = await execute_at_once(order, together)
    assert (results, ended) == (("A", "B", "C"), ["c", "b", "a"])


async def test_no_calls_give_no_results() -> None:
    """TOOL-14"""

    async def never(call: str) -> str:
        raise AssertionError(call)

    assert await execute_at_once("", never) == ()


async def test_a_broken_store_cancels_the_others_and_is_raised_as_it_is() -> None:
    """TOOL-15: what is no tool trouble ends the turn."""
    cancelled = asyncio.Event()

    async def fail(call: str) -> None:
        if call == "b":
            raise ConnectionError("store")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with pytest.raises(ConnectionError, match="store"):
        await execute_at_once("ab", fail)
    assert cancelled.is_set()
