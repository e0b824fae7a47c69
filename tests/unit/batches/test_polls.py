"""How often results of a batch are looked for."""

import asyncio

from stepfleet.orchestrator.batches.results import Pause


async def test_a_poll_comes_later_where_many_runs_are_left() -> None:
    """Each asks every shard: a batch of thousands is not asked for 20 times a second."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    await Pause().wait(idle=False, left=400)
    assert loop.time() - began >= 0.19
