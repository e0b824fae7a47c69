"""The batched transport without Celery: order, addresses, formats, and single consumers."""

# mypy: allow-untyped-calls, implicit-reexport, disable-error-code="attr-defined"

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import redis
from kombu import Connection, Consumer, Queue
from support.deadlines import wait_until
from support.servers.redis_servers import RedisServer, free_port

from stepfleet.orchestrator import AsyncFleet
from stepfleet.orchestrator.settings.settings import load_settings
from stepfleet.worker.engine import transport
from stepfleet.worker.engine.transport import batch_url
from stepfleet.worker.engine.transport.ack_buffer import script

LONG = 60.0

transport.register()


@contextmanager
def consuming(
    url: str, *queues: str, prefetch: int = 0, no_ack: bool = False, **options: Any
) -> Iterator[tuple[Connection, list[Any]]]:
    got: list[Any] = []
    with Connection(batch_url(url), transport_options=options) as connection:
        channel = connection.channel()
        if prefetch:
            channel.basic_qos(0, prefetch, False)  # noqa: FBT003 AMQP's order
        consumer = Consumer(
            channel,
            [Queue(q) for q in queues],
            on_message=got.append,
            no_ack=no_ack,
            accept=["json"],
        )
        with consumer:
            yield connection, got


def drain(connection: Connection, got: list[Any], count: int) -> list[Any]:
    def enough() -> bool:
        with suppress(TimeoutError):
            connection.drain_events(timeout=0.2)
        return len(got) >= count

    wait_until(enough, within=LONG, what=f"{count} messages")
    return [message.payload for message in got]


def publish(url: str, queue: str, *bodies: object, priority: int = 0) -> None:
    with Connection(url) as connection:
        producer = connection.Producer()
        for body in bodies:
            producer.publish(
                body,
                routing_key=queue,
                declare=[Queue(queue)],
                priority=priority,
                serializer="json",
            )


@pytest.fixture
def broker(redis_url: str) -> Iterator[Any]:
    client = redis.Redis.from_url(redis_url)
    yield client
    client.close()


def test_urgent_messages_come_first_whatever_their_queue(redis_url: str, broker: Any) -> None:
    publish(redis_url, "a", "a9", priority=9)
    publish(redis_url, "b", "b3", priority=3)
    publish(redis_url, "a", "a0", priority=0)
    with consuming(redis_url, "a", "b") as (connection, got):
        assert drain(connection, got, 3) == ["a0", "b3", "a9"]


def test_queues_take_turns(redis_url: str) -> None:
    publish(redis_url, "a", *(f"a{i}" for i in range(4)))
    publish(redis_url, "b", *(f"b{i}" for i in range(2)))
    with consuming(redis_url, "a", "b") as (connection, got):
        assert drain(connection, got, 6) == ["a0", "b0", "a1", "b1", "a2", "a3"]


def test_a_fetch_takes_more_messages_than_a_script_can_name_at_once(
    redis_url: str, broker: Any
) -> None:
    publish(redis_url, "a", 0)
    broker.rpush("a", *broker.lrange("a", 0, 0) * 9_999)  # Lua's stack holds 8,000 values
    largest: dict[str, Any] = {"batch_messages": 10_000, "batch_bytes": 100_000_000}
    with consuming(redis_url, "a", **largest) as (connection, got):
        drain(connection, got, 10_000)
        assert broker.hlen("unacked") == broker.zcard("unacked_index") == 10_000
        for message in got:
            message.ack()
        wait_until(lambda: not broker.hlen("unacked"), within=LONG, what="acknowledgements")
    assert broker.zcard("unacked_index") == 0


@pytest.mark.parametrize("broken", ["a:b", "unacked", "unacked_index", "quarantine"])
def test_a_fetch_that_fails_halfway_loses_no_message(broker: Any, broken: str) -> None:
    keys, others = ["a", "a:b"], ["unacked_index", "unacked", "quarantine", "given up"]
    broker.lpush("a", "m1", "m2", "m3")
    broker.lpush("a:b", "a message that is too large")
    broker.delete(broken)
    broker.set(broken, "of another kind")
    argv = [*others, "tag", 10, 1_000_000, 10, 0, 2, 10, 10, ',"","a"]', ',"","b"]']
    with pytest.raises(redis.ResponseError, match="wrong kind of value"):
        broker.eval(script("fetch").text, len(keys), *keys, *argv)

    left = broker.llen("a")
    assert left == (3 if broken.startswith("unacked") else 0)
    if not left:
        assert broker.hlen("unacked") == broker.zcard("unacked_index") == 3


def test_a_fixed_order_serves_the_first_queue_first(redis_url: str) -> None:
    publish(redis_url, "a", *(f"a{i}" for i in range(3)))
    publish(redis_url, "b", "b0")
    with consuming(redis_url, "b", "a", queue_order_strategy="sorted") as (connection, got):
        assert drain(connection, got, 4) == ["a0", "a1", "a2", "b0"]


def test_unacked_entries_are_kombus_own(redis_url: str, broker: Any) -> None:
    publish(redis_url, "a", {"x": 1})
    with consuming(redis_url, "a") as (connection, got):
        drain(connection, got, 1)
        ((tag, entry),) = broker.hgetall("unacked").items()
        message, exchange, routing_key = json.loads(entry)
        assert message["properties"]["delivery_info"]["routing_key"] == "a"
        assert (exchange, routing_key) == ("", "a")
        assert broker.zrange("unacked_index", 0, -1) == [tag]
        got[0].ack()
        assert broker.hlen("unacked") == broker.zcard("unacked_index") == 0


def test_the_prefetch_holds_for_a_plain_consumer(redis_url: str, broker: Any) -> None:
    publish(redis_url, "a", *range(10))
    with consuming(redis_url, "a", prefetch=3) as (connection, got):
        assert drain(connection, got, 3) == [0, 1, 2]
        with pytest.raises(TimeoutError):
            connection.drain_events(timeout=0.3)
        assert len(got) == 3
        got[0].ack()
        assert drain(connection, got, 4) == [0, 1, 2, 3]


def test_a_consumer_that_closes_gives_back_in_order_and_marks_as_redelivered(
    redis_url: str, broker: Any
) -> None:
    publish(redis_url, "a", *range(5))
    with consuming(redis_url, "a", prefetch=3) as (connection, got):
        drain(connection, got, 3)
        got[1].ack()
    assert broker.hlen("unacked") == 0
    with consuming(redis_url, "a") as (connection, got):
        assert drain(connection, got, 4) == [0, 2, 3, 4]
        assert [m.delivery_info.get("redelivered", False) for m in got] == [
            True,
            True,
            False,
            False,
        ]


def test_a_rejected_message_is_dropped_or_queued_behind_the_others(
    redis_url: str, broker: Any
) -> None:
    publish(redis_url, "a", *range(3))
    with consuming(redis_url, "a", prefetch=2) as (connection, got):
        drain(connection, got, 2)
        got[0].requeue()
        got[1].reject()
        assert drain(connection, got, 4) == [0, 1, 2, 0]
        for message in got[2:]:
            message.ack()
    assert broker.llen("a") == broker.hlen("unacked") == 0


def test_messages_of_a_consumer_without_acknowledgements_are_not_registered(
    redis_url: str, broker: Any
) -> None:
    publish(redis_url, "a", *range(3))
    with consuming(redis_url, "a", no_ack=True) as (connection, got):
        assert drain(connection, got, 3) == [0, 1, 2]
        assert broker.hlen("unacked") == 0


def test_single_messages_are_got_with_and_without_acknowledgement(
    redis_url: str, broker: Any
) -> None:
    publish(redis_url, "a", "first", "second")
    with Connection(batch_url(redis_url)) as connection:
        queue = Queue("a")(connection.channel())
        message = queue.get()
        assert message.payload == "first"
        assert broker.hlen("unacked") == 1
        message.ack()
        assert queue.get(no_ack=True).payload == "second"
        assert broker.hlen("unacked") == 0
        assert queue.get() is None


def test_a_late_acknowledgement_never_means_another_delivery(redis_url: str, broker: Any) -> None:
    publish(redis_url, "a", "x")
    with consuming(redis_url, "a") as (connection, got):
        drain(connection, got, 1)
        late = got[0]
        late.channel.restore_message(late.delivery_tag, behind=False)
        with consuming(redis_url, "a") as (other, again):
            drain(other, again, 1)
            late.ack()
            assert broker.hlen("unacked") == 1
            again[0].ack()
            assert broker.hlen("unacked") == 0


def test_a_fetcher_that_was_given_up_takes_nothing(redis_url: str, broker: Any) -> None:
    publish(redis_url, "a", "x")
    with Connection(batch_url(redis_url)) as connection:
        channel = connection.channel()
        channel.basic_consume("a", no_ack=False, callback=None, consumer_tag="c")
        connection.transport.cycle.on_poll_start()  # sends a fetch, whose reply nobody reads
        fetch = channel._sent
        channel.client.connection.disconnect()
        channel.restore_pending()
        assert broker.llen("a") == 1
        keys, args = channel._script_call(fetch)
        assert broker.evalsha(script("fetch").sha, len(keys), *keys, *args) == [
            0,
            0,
        ]
        assert broker.llen("a") == 1


def test_a_prefix_for_all_keys_is_kept(redis_url: str, broker: Any) -> None:
    with Connection(redis_url, transport_options={"global_keyprefix": "p-"}) as connection:
        producer = connection.Producer(serializer="json")
        producer.publish("x", routing_key="a", declare=[Queue("a")])
    with consuming(redis_url, "a", global_keyprefix="p-") as (connection, got):
        assert drain(connection, got, 1) == ["x"]
        assert broker.hlen("p-unacked") == 1
    assert broker.llen("p-a") == 1
    assert broker.hlen("p-unacked") == 0


def test_a_fetch_stops_at_its_bytes(redis_url: str, broker: Any) -> None:
    publish(redis_url, "a", *("y" * 1000 for _ in range(20)))
    with consuming(redis_url, "a", batch_bytes=3000) as (connection, got):
        drain(connection, got, 1)
        assert len(got) < 5
        drain(connection, got, 20)


def test_the_script_is_loaded_again_after_the_server_forgot_it(redis_url: str, broker: Any) -> None:
    publish(redis_url, "a", "x")
    with consuming(redis_url, "a") as (connection, got):
        drain(connection, got, 1)
        broker.script_flush()
        publish(redis_url, "a", "y")
        assert drain(connection, got, 2) == ["x", "y"]


def test_a_server_out_of_memory_still_gives_and_takes_back(
    own_redis: Callable[..., RedisServer],
) -> None:
    server: RedisServer = own_redis()
    publish(server.url, "a", "x", "y")
    with (
        closing(redis.Redis.from_url(server.url)) as client,
        consuming(server.url, "a", prefetch=1) as (connection, got),
    ):
        client.config_set("maxmemory", "1mb")
        drain(connection, got, 1)
        got[0].ack()
        assert drain(connection, got, 2) == ["x", "y"]
        got[1].ack()
        assert client.hlen("unacked") == 0


def test_a_server_that_refuses_is_asked_again(own_redis: Callable[..., RedisServer]) -> None:
    server: RedisServer = own_redis()
    publish(server.url, "a", "x", "y")
    with closing(redis.Redis.from_url(server.url)) as client:
        with consuming(server.url, "a", prefetch=1) as (connection, got):
            drain(connection, got, 1)
            client.execute_command("ACL", "SETUSER", "default", "-evalsha")
            got[0].reject()
            with pytest.raises(TimeoutError):
                connection.drain_events(timeout=0.5)
            client.execute_command("ACL", "SETUSER", "default", "+@all")
            assert drain(connection, got, 2) == ["x", "y"]
            got[1].ack()
        assert client.llen("a") == client.hlen("unacked") == 0


def test_the_unix_socket_serves(redis_server: RedisServer) -> None:
    redis_server.flush()
    publish(redis_server.url, "a", "x")
    with consuming(redis_server.unix_url, "a") as (connection, got):
        assert drain(connection, got, 1) == ["x"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("redis://:p@h:1/2", "redis-batch://:p@h:1/2"),
        ("rediss://h/0?ssl_cert_reqs=none", "rediss-batch://h/0?ssl_cert_reqs=none"),
        ("redis+socket:///r.sock", "redis-batch+socket:///r.sock"),
        ("unix:///r.sock?db=3", "redis-batch+socket:///r.sock?virtual_host=3"),
        ("redis-batch://h", "redis-batch://h"),
        ("amqp://h", "amqp://h"),
    ],
)
def test_addresses_are_translated(given: str, expected: str) -> None:
    assert batch_url(given) == expected


def certificate(folder: Path) -> tuple[Path, Path]:
    openssl = shutil.which("openssl")
    assert openssl, "the test needs the openssl command (apt-get install openssl)"
    key, cert = folder / "key.pem", folder / "cert.pem"
    subprocess.run(
        [
            *(openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-keyout", str(key), "-out", str(cert), "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
        ],
        check=True,
        capture_output=True,
    )
    return key, cert


@pytest.fixture
def tls_redis(own_redis: Callable[..., RedisServer], tmp_path: Path) -> tuple[str, str, Path]:
    key, cert = certificate(tmp_path)
    port = str(free_port())
    server = own_redis(
        tls_port=port, tls_cert_file=str(cert), tls_key_file=str(key),
        tls_ca_cert_file=str(cert), tls_auth_clients="no",
    )  # fmt: skip
    return server.url, f"rediss-batch://localhost:{port}/0", cert


def test_tls_serves_with_the_servers_certificate(tls_redis: tuple[str, str, Path]) -> None:
    plain, url, cert = tls_redis
    publish(plain, "a", "x")
    with consuming(f"{url}?ssl_ca_certs={cert}&ssl_cert_reqs=required", "a") as (connection, got):
        assert drain(connection, got, 1) == ["x"]


async def test_tls_without_certificates_serves_store_and_broker_alike(
    tls_redis: tuple[str, str, Path],
) -> None:
    plain, url, _ = tls_redis
    publish(plain, "a", "x")
    store = url.replace("rediss-batch", "rediss") + "?ssl_cert_reqs=CERT_NONE"
    settings = load_settings(redis_url=store)
    async with AsyncFleet(settings=settings) as fleet:
        await fleet.check()
    with consuming(batch_url(settings.broker), "a") as (connection, got):
        assert drain(connection, got, 1) == ["x"]


def test_tls_refuses_an_unknown_certificate_by_default(tls_redis: tuple[str, str, Path]) -> None:
    _, url, _ = tls_redis
    refusal = pytest.raises(redis.ConnectionError, match="CERTIFICATE_VERIFY_FAILED")
    with Connection(url) as connection, refusal:
        connection.channel()
