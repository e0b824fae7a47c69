"""Outboxes: calls cross threads in order, and wake whoever polls."""

import select
import threading
from collections.abc import Iterator
from functools import partial

import pytest

from stepfleet.worker.engine.pool.asyncio_pool import DirectOutbox, HubOutbox


@pytest.fixture
def outbox() -> Iterator[HubOutbox]:
    outbox = HubOutbox()
    yield outbox
    outbox.close()


def readable(outbox: HubOutbox) -> bool:
    return bool(select.select([outbox.fileno()], [], [], 0)[0])


def test_calls_are_delivered_in_order_and_only_when_asked(outbox: HubOutbox) -> None:
    made: list[int] = []
    for i in range(3):
        outbox.post(partial(made.append, i))
    assert made == []
    outbox.deliver()
    assert made == [0, 1, 2]


def test_a_post_from_another_thread_makes_the_descriptor_readable(outbox: HubOutbox) -> None:
    assert not readable(outbox)
    thread = threading.Thread(target=outbox.post, args=(lambda: None,))
    thread.start()
    thread.join()
    assert readable(outbox)
    outbox.deliver()
    assert not readable(outbox)


def test_what_a_call_posts_waits_for_the_next_round(outbox: HubOutbox) -> None:
    made: list[str] = []
    outbox.post(lambda: outbox.post(lambda: made.append("second")))
    outbox.deliver()
    assert made == []
    assert readable(outbox)
    outbox.deliver()
    assert made == ["second"]


def test_a_call_that_raises_leaves_the_others_to_be_delivered(outbox: HubOutbox) -> None:
    made: list[str] = []

    def explode() -> None:
        raise ZeroDivisionError

    outbox.post(explode)
    outbox.post(lambda: made.append("after"))
    with pytest.raises(ZeroDivisionError):
        outbox.deliver()
    assert readable(outbox)
    outbox.deliver()
    assert made == ["after"]


def test_no_post_of_many_threads_is_lost(outbox: HubOutbox) -> None:
    made: list[int] = []

    def post_many() -> None:
        for _ in range(500):
            outbox.post(partial(made.append, 1))

    threads = [threading.Thread(target=post_many) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) or readable(outbox):
        outbox.wait(0.1)
        outbox.deliver()
    assert len(made) == 2000


def test_posting_to_a_closed_outbox_is_harmless(outbox: HubOutbox) -> None:
    made: list[int] = []
    outbox.close()
    outbox.post(partial(made.append, 1))
    outbox.wait(0)
    assert made == []


def test_the_direct_outbox_makes_calls_at_once_and_ends_a_wait() -> None:
    outbox = DirectOutbox()
    made: list[int] = []
    outbox.post(lambda: made.append(1))
    assert made == [1]
    outbox.wait(60)
