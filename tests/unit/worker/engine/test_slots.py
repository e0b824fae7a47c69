"""Slots: who may run, and who waits; and what tasks in progress may hold without a collection."""

import gc
from collections.abc import Iterator

import pytest
from celery import Celery

from stepfleet.worker.engine.pool import Pool
from stepfleet.worker.engine.pool.asyncio_pool import Slots


def filled(limit: int, *jobs: str) -> Slots[str]:
    slots: Slots[str] = Slots(limit)
    for job in jobs:
        slots.queue(job)
    while slots.take() is not None:
        pass
    return slots


def test_jobs_start_in_order_of_arrival_until_the_slots_are_taken() -> None:
    slots = filled(2, "a", "b", "c", "d")
    assert slots.running == {"a", "b"}
    assert list(slots.waiting) == ["c", "d"]


def test_a_free_slot_goes_to_the_job_that_waits_longest() -> None:
    slots = filled(1, "a", "b", "c")
    slots.free("a")
    assert slots.take() == "b"
    assert slots.take() is None


def test_freeing_a_slot_twice_frees_one() -> None:
    slots = filled(1, "a", "b", "c")
    slots.free("a")
    slots.free("a")
    assert slots.take() == "b"
    assert slots.take() is None


def test_a_shrunk_pool_starts_nothing_until_enough_has_ended() -> None:
    slots = filled(3, "a", "b", "c", "d")
    slots.resize(-2)
    slots.free("a")
    slots.free("b")
    assert slots.take() is None
    slots.free("c")
    assert slots.take() == "d"


def test_a_grown_pool_starts_more() -> None:
    slots = filled(1, "a", "b")
    slots.resize(1)
    assert slots.take() == "b"


@pytest.mark.parametrize("change", [-1, -5])
def test_the_last_slot_stays(change: int) -> None:
    slots = filled(1)
    with pytest.raises(ValueError, match="needs at least 1"):
        slots.resize(change)
    assert slots.limit == 1


def test_dropping_what_waits_leaves_what_runs() -> None:
    slots = filled(1, "a", "b", "c")
    assert slots.drop_waiting() == 2
    assert slots.running == {"a"}
    assert slots.take() is None


@pytest.fixture
def thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


@pytest.mark.usefixtures("thresholds")
def test_garbage_is_not_looked_for_among_what_tasks_in_progress_hold() -> None:
    pool = Pool(1000, app=Celery("slots", set_as_current=False))
    pool.on_start()
    try:
        before = gc.get_stats()[0]["collections"]
        held: list[list[int]] = [[] for _ in range(1000 * 150)]
        assert gc.get_stats()[0]["collections"] == before
        held += ([] for _ in range(1000 * 150))
        assert gc.get_stats()[0]["collections"] > before
    finally:
        pool.on_terminate()
