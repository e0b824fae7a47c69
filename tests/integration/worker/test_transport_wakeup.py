"""What is heard between a fetch and its reply is not forgotten when the reply says `empty`."""

import select
from collections.abc import Iterator
from contextlib import closing, suppress
from queue import Empty
from typing import Any

import pytest
from kombu.connection import Connection
from kombu.entity import Queue
from kombu.messaging import Consumer
from redis import Redis

from stepfleet.worker.engine.transport import batch_url, register
from stepfleet.worker.engine.transport.channel import Channel

LONG = 60.0


@pytest.fixture
def channel(redis_url: str) -> Iterator[Channel]:
    """A channel that consumes from an empty queue and has heard nothing yet."""
    register()
    opened: Any = Connection(batch_url(redis_url))  # type: ignore[no-untyped-call]
    with opened as connection, connection.channel() as channel:
        assert isinstance(channel, Channel)
        queue: Any = Queue("waking")  # type: ignore[no-untyped-call]
        consumer: Any = Consumer(channel, [queue], on_message=print)  # type: ignore[no-untyped-call]
        with consumer:
            with suppress(TimeoutError):
                connection.drain_events(timeout=0.1)
            yield channel


def wait_for_words(connection: Any) -> None:
    assert select.select([connection._sock], [], [], LONG)[0]


def test_a_message_that_comes_before_the_reply_of_an_empty_fetch_is_looked_for(
    channel: Channel, redis_url: str
) -> None:
    channel.next_fetch_at = 0.0
    channel.send_fetch()
    wait_for_words(channel.client.connection)
    with closing(Redis.from_url(redis_url)) as redis:
        redis.lpush("waking", "a message")
    wait_for_words(channel.wakeups.connection)
    with pytest.raises(Empty):
        channel.on_wakeup()
    with pytest.raises(Empty):
        channel.read_reply()
    assert channel.wants_to_fetch()
