"""The rescuer where hints are published by Celery, as with a broker of another kind."""

from typing import Any

from support.deadlines import until
from support.runs.stored_runs import Bench

from stepfleet.worker.runtime.rescuer import Rescuer

BENCH: dict[str, Any] = {"lease": 0.5, "grace": 0.2, "enqueue": "publish"}


async def test_a_queue_that_nobody_has_written_to_yet_holds_no_messages(desk: Bench) -> None:
    """DIST-06: kombu knows no queue while its list is empty."""
    assert desk.opened.dispatch.queue_key is None
    assert await desk.opened.dispatch.waiting() == 0


async def test_a_lost_run_is_published_again_although_the_queue_is_empty(desk: Bench) -> None:
    """DIST-06, DIST-10"""
    await desk.create()
    opened = desk.opened
    rescuer = Rescuer(
        opened.connection,
        opened.keys,
        opened.dispatch,
        grace=0.2,
        interval=0.1,
        long_queue=1000,
        jitter=lambda: 0.5,
    )
    assert await until(rescuer.rescue, within=60, what="a rescue") == 1
    assert await opened.dispatch.waiting() == 1
    assert await desk.queued() == 1
