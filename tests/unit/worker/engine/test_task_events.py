"""Events of tasks: the fields of Celery's, in bundles, and none is lost with a connection."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from celery.events.dispatcher import EventDispatcher
from kombu.connection import Connection
from kombu.messaging import Consumer

from stepfleet.worker.engine.consumer import TaskEvents

SUCCESS = {"uuid": "one", "result": "'continue'", "runtime": 0.5}


class Watched:
    """Two dispatchers on one broker in memory, and what has arrived from them."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.app = Celery("events", broker="memory://", set_as_current=False)
        self.buffered = 0
        self.seen: list[dict[str, Any]] = []
        receiver = self.app.events.Receiver(connection, handlers={"*": self.seen.append})
        queues, receive = [receiver.queue], [receiver._receive]
        channel, taken = connection.channel(), ["json"]
        consumer: Any = Consumer(channel, queues, callbacks=receive, accept=taken)  # type: ignore[no-untyped-call]
        consumer.consume()

    def dispatcher(self, kind: type[EventDispatcher], **options: Any) -> Any:
        chosen = {"buffer_group": ["task"], "on_send_buffered": self._count, **options}
        return kind(self.connection, hostname="w1", app=self.app, **chosen)

    def _count(self) -> None:
        self.buffered += 1

    def arrived(self) -> list[dict[str, Any]]:
        with contextlib.suppress(TimeoutError):
            while True:
                self.connection.drain_events(timeout=0.01)
        return self.seen


@pytest.fixture
def watched() -> Iterator[Watched]:
    memory: Any = Connection("memory://")  # type: ignore[no-untyped-call]
    with memory as connection:
        yield Watched(connection)


def test_an_event_has_the_fields_of_celerys(watched: Watched) -> None:
    for kind in (EventDispatcher, TaskEvents):
        dispatcher = watched.dispatcher(kind)
        dispatcher.send("task-succeeded", **SUCCESS)
        dispatcher.flush()
    theirs, ours = watched.arrived()
    assert ours.keys() == theirs.keys()
    changing = {"timestamp", "clock", "local_received"}
    assert {k: v for k, v in ours.items() if k not in changing} == {
        k: v for k, v in theirs.items() if k not in changing
    }
    assert ours["clock"] > theirs["clock"]
    assert ours["timestamp"] >= theirs["timestamp"]


def test_events_of_tasks_wait_for_their_bundle_and_others_do_not(watched: Watched) -> None:
    dispatcher = watched.dispatcher(TaskEvents)
    dispatcher.send("task-started", uuid="one")
    dispatcher.send("worker-heartbeat")
    assert [one["type"] for one in watched.arrived()] == ["worker-heartbeat"]
    assert watched.buffered == 1
    dispatcher.buffer_limit = 2
    dispatcher.send("task-succeeded", **SUCCESS)
    assert [one["type"] for one in watched.arrived()][1:] == ["task-started", "task-succeeded"]


def test_groups_that_are_not_wanted_and_a_dispatcher_that_is_off_send_nothing(
    watched: Watched,
) -> None:
    for dispatcher in (
        watched.dispatcher(TaskEvents, groups=["worker"]),
        watched.dispatcher(TaskEvents, enabled=False),
    ):
        dispatcher.send("task-succeeded", **SUCCESS)
        dispatcher.flush()
    assert watched.arrived() == []


def test_what_a_lost_connection_has_not_sent_comes_over_the_next_one(watched: Watched) -> None:
    first, second = watched.dispatcher(TaskEvents), watched.dispatcher(TaskEvents)
    first.send("task-started", uuid="one")
    first.keep()
    first.keep()
    first.disable()
    second.extend_buffer(first)
    second.flush()
    assert [one["type"] for one in watched.arrived()] == ["task-started"]
