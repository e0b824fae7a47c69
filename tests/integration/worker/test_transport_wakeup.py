"""When a channel fetches: after a wake-up at once, for acknowledgements alone a moment later."""

import select
from collections.abc import Iterator
from contextlib import closing, suppress
from queue import Empty
from time import monotonic
from typing import Any

import pytest
from kombu.asynchronous import Hub
from kombu.connection import Connection
from kombu.entity import Queue
from kombu.messaging import Consumer
from redis import Redis
from support.deadlines import wait_until

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


def test_what_others_take_and_acknowledge_wakes_nobody(channel: Channel, redis_url: str) -> None:
    """A message wakes all who wait for one, once: with many workers that is most of its cost."""
    with closing(Redis.from_url(redis_url)) as redis:
        redis.zadd("unacked_index", {"theirs:1": 1.0})
        redis.hset("unacked", "theirs:1", "[]")
        redis.zrem("unacked_index", "theirs:1")
        redis.hdel("unacked", "theirs:1")
        redis.lpush("waking", "a message")
    heard, ear = b"", channel.wakeups.connection
    while b"waking" not in heard:
        wait_for_words(ear)
        heard += ear._sock.recv(65_536)
    assert b"unacked" not in heard


def test_acknowledgements_travel_with_a_fetch_of_messages_or_a_moment_later(
    channel: Channel,
) -> None:
    hub: Any = Hub()  # type: ignore[no-untyped-call]
    never = monotonic() + 10 * LONG
    channel.connection.register_with_event_loop(channel.connection, hub)
    channel.next_fetch_at = never  # the queues are empty
    channel.acknowledge("a tag")
    assert not channel.wants_to_fetch()
    assert hub.fire_timers(max_delay=LONG) < 0.5  # the hub looks again
    channel.next_fetch_at = 0.0
    assert channel.wants_to_fetch()
    channel.next_fetch_at = never
    wait_until(channel.wants_to_fetch, within=LONG, what="a fetch for acknowledgements alone")
