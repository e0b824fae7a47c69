"""The batched transport under real workers: nothing lost, nothing repeated, others served."""

import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from celery import Celery
from redis import Redis
from support.deadlines import wait_until
from support.servers.broker_proxy import proxied
from support.servers.redis_servers import RedisServer
from support.workers.toy_worker import ToyWorker, client_app

from stepfleet.worker.engine.transport.channel import Channel

LONG = 60.0

Start = Callable[..., ToyWorker]


@pytest.fixture
def app(redis_url: str) -> Iterator[Celery]:
    with client_app(redis_url, redis_url) as app:
        yield app


@pytest.fixture
def start(redis_url: str, tmp_path: Path) -> Iterator[Start]:
    workers: list[ToyWorker] = []

    def start(broker: str = "", **arguments: Any) -> ToyWorker:
        broker = broker or redis_url.replace("redis://", "redis-batch://")
        workers.append(ToyWorker(tmp_path, broker, redis_url, **arguments))
        return workers[-1].start()

    yield start
    for worker in workers:
        worker.end()


def ran(worker: ToyWorker) -> Counter[str]:
    return Counter({str(k): int(v) for k, v in worker.notes.hgetall("ran").items()})


def count_of(worker: ToyWorker) -> int:
    return int(worker.notes.hlen("ran"))


def more_ran(worker: ToyWorker, count: int) -> bool:
    return count_of(worker) > count


def has_passed(time: float) -> bool:
    return monotonic() > time


def settled(broker: Redis) -> bool:
    return not (broker.llen("toy") or broker.hlen("unacked") or broker.zcard("unacked_index"))


def test_every_message_runs_once_and_is_acknowledged(app: Celery, start: Start) -> None:
    # All of them first: a worker that waits for a slow sender fetches one at a time.
    for i in range(2000):
        app.send_task("toyapp.count", (str(i),), ignore_result=True)
    worker = start()
    wait_until(lambda: count_of(worker) == 2000, within=60, what="2,000 tasks")
    wait_until(lambda: settled(worker.notes), within=LONG, what="the acknowledgements")
    assert set(ran(worker).values()) == {1}
    broker = app.control.inspect([worker.name], timeout=LONG).stats()[worker.name]["pool"]["broker"]
    assert broker["messages"] == broker["acknowledged"] == 2000
    assert broker["fetches"] < 1900


def test_an_idle_worker_hears_of_a_message_at_once(app: Celery, start: Start) -> None:
    # Seconds that it would wait if it did not hear of it.
    worker = start(settings={"broker_transport_options": {"polling_interval": 60}})
    app.send_task("toyapp.add", (1, 1)).get(timeout=LONG)
    slowest = 0.0
    for _ in range(3):
        pause_until = monotonic() + 1.3
        wait_until(partial(has_passed, pause_until), within=LONG, what="some idle time")
        began = monotonic()
        app.send_task("toyapp.add", (1, 1)).get(timeout=LONG)
        slowest = max(slowest, monotonic() - began)
    assert slowest < 30
    assert worker.exit_code is None


def test_no_more_is_fetched_than_the_prefetch_allows(app: Celery, start: Start) -> None:
    worker = start(options=("-c", "2"), settings={"worker_prefetch_multiplier": 2})
    sent = [app.send_task("toyapp.late_gate", (f"t{i}",)) for i in range(10)]
    wait_until(lambda: worker.notes.llen("started") == 2, within=LONG, what="two running tasks")
    wait_until(lambda: worker.notes.hlen("unacked") == 4, within=LONG, what="four fetched messages")
    assert worker.notes.llen("toy") == 6
    for i in range(10):
        worker.open(f"t{i}")
    assert [r.get(timeout=LONG) for r in sent] == [f"t{i}" for i in range(10)]
    wait_until(lambda: settled(worker.notes), within=LONG, what="the acknowledgements")


def test_a_stock_worker_shares_the_queue(app: Celery, start: Start, redis_url: str) -> None:
    batch = start()
    start(redis_url, name="stock", options=("-P", "solo"), settings={"worker_pool": ""})
    for i in range(1000):
        app.send_task("toyapp.count", (str(i),), ignore_result=True)
    wait_until(lambda: count_of(batch) == 1000, within=60, what="1,000 tasks")
    wait_until(lambda: settled(batch.notes), within=LONG, what="the acknowledgements")
    assert set(ran(batch).values()) == {1}


def test_a_stock_worker_restores_what_a_killed_worker_held(
    app: Celery, start: Start, redis_url: str
) -> None:
    held = start(options=("-c", "20"))
    sent = [app.send_task("toyapp.late_gate", (f"t{i}",)) for i in range(20)]
    wait_until(lambda: held.notes.llen("started") == 20, within=LONG, what="twenty running tasks")
    held.signal(signal.SIGKILL)
    held.wait()
    for i in range(20):
        held.open(f"t{i}")
    options = {
        "visibility_timeout": 1,
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
    }
    start(
        redis_url,
        name="stock",
        options=("-P", "solo"),
        settings={"worker_pool": "", "broker_transport_options": options},
    )
    assert [r.get(timeout=LONG) for r in sent] == [f"t{i}" for i in range(20)]


def test_it_restores_what_a_killed_worker_held(app: Celery, start: Start) -> None:
    options = {
        "visibility_timeout": 1,
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
    }
    held = start(options=("-c", "20"))
    sent = [app.send_task("toyapp.late_gate", (f"t{i}",)) for i in range(20)]
    wait_until(lambda: held.notes.llen("started") == 20, within=LONG, what="twenty running tasks")
    held.signal(signal.SIGKILL)
    held.wait()
    for i in range(20):
        held.open(f"t{i}")
    start(name="w2", settings={"broker_transport_options": options})
    assert [r.get(timeout=LONG) for r in sent] == [f"t{i}" for i in range(20)]


def test_a_worker_killed_in_its_sweep_keeps_no_other_from_it_for_long(
    app: Celery, start: Start
) -> None:
    options = {"visibility_timeout": 1, "unacked_restore_interval": 1}
    options["unacked_restore_throttle"] = 1
    held = start(options=("-c", "5"))
    sent = [app.send_task("toyapp.late_gate", (f"t{i}",)) for i in range(5)]
    wait_until(lambda: held.notes.llen("started") == 5, within=60, what="five running tasks")
    held.signal(signal.SIGKILL)
    held.wait()
    held.notes.lock("unacked_mutex", timeout=Channel.unacked_mutex_expire).acquire()
    for i in range(5):
        held.open(f"t{i}")
    start(name="w2", settings={"broker_transport_options": options})
    assert [r.get(timeout=60) for r in sent] == [f"t{i}" for i in range(5)]


@pytest.mark.timeout(300)
def test_workers_killed_under_load_lose_nothing(app: Celery, start: Start) -> None:
    sent = 0
    held = [app.send_task("toyapp.late_gate", (f"t{i}",)) for i in range(20)]
    options = {"visibility_timeout": 2, "unacked_restore_interval": 1}
    options |= {"unacked_restore_throttle": 1, "unacked_restore_limit": 1000}
    settings = {"task_acks_late": True, "broker_transport_options": options}
    for attempt in range(4):
        worker = start(name=f"k{attempt}", settings=settings)
        before = count_of(worker)
        for _ in range(500):
            app.send_task("toyapp.count", (str(sent),), ignore_result=True)
            sent += 1
        wait_until(partial(more_ran, worker, before + 200), within=60, what="progress")
        # The gates are shut: at least those tasks run as it dies.
        worker.signal(signal.SIGKILL)
        worker.wait()
    last = start(name="last", settings=settings)
    for i in range(20):
        last.open(f"t{i}")
    wait_until(lambda: count_of(last) == sent, within=120, what="all tasks")
    assert [r.get(timeout=LONG) for r in held] == [f"t{i}" for i in range(20)]


def test_tasks_that_run_across_a_lost_connection_run_once_and_are_acknowledged(
    start: Start, own_redis: Callable[..., RedisServer], redis_url: str
) -> None:
    broker: RedisServer = own_redis()
    url = broker.url.replace("redis://", "redis-batch://")
    worker = start(url, options=("-c", "5"), settings={"worker_prefetch_multiplier": 2})
    with client_app(broker.url, redis_url) as app, closing(Redis.from_url(broker.url)) as queues:
        sent = [app.send_task("toyapp.late_gate", (f"t{i}",)) for i in range(8)]
        wait_until(
            lambda: worker.notes.llen("started") == 5, within=LONG, what="five running tasks"
        )
        connected = worker.log.count("Connected to")
        queues.client_kill_filter(_type="normal", skipme=True)
        wait_until(
            lambda: worker.log.count("Connected to") > connected, within=LONG, what="another"
        )
        for i in range(8):
            worker.open(f"t{i}")
        assert [r.get(timeout=LONG) for r in sent] == [f"t{i}" for i in range(8)]
        wait_until(lambda: settled(queues), within=LONG, what="the acknowledgements")
    assert sorted(worker.notes.lrange("finished", 0, -1)) == sorted(f"t{i}" for i in range(8))


def test_tasks_that_run_across_a_restart_of_the_broker_run_once(
    start: Start, own_redis: Callable[..., RedisServer], redis_url: str
) -> None:
    broker: RedisServer = own_redis()
    worker = start(broker.url.replace("redis://", "redis-batch://"))
    with client_app(broker.url, redis_url) as app:
        sent = [app.send_task("toyapp.late_gate", (f"t{i}",)) for i in range(5)]
        wait_until(
            lambda: worker.notes.llen("started") == 5, within=LONG, what="five running tasks"
        )
        broker.stop()
        for i in range(4):
            worker.open(f"t{i}")
        assert [r.get(timeout=LONG) for r in sent[:4]] == [f"t{i}" for i in range(4)]
        broker.start()
        assert app.send_task("toyapp.add", (1, 1)).get(timeout=LONG) == 2
        worker.open("t4")
        assert sent[4].get(timeout=LONG) == "t4"
        with closing(Redis.from_url(broker.url)) as queues:
            wait_until(lambda: settled(queues), within=LONG, what="the acknowledgements")
    assert worker.notes.llen("finished") == 5


def test_messages_of_a_fetch_whose_reply_was_lost_come_back_at_once(
    app: Celery, start: Start, redis_server: RedisServer
) -> None:
    with proxied(redis_server.port) as proxy:
        worker = start(proxy.url, options=("-c", "50"))
        app.send_task("toyapp.add", (1, 1)).get(timeout=LONG)
        proxy.lose_reply_to(b"EVALSHA")
        sent = [app.send_task("toyapp.add", (i, 1)) for i in range(30)]
        assert proxy.lost.wait(LONG), "no fetch went through the proxy"
        assert [r.get(timeout=LONG) for r in sent] == list(range(1, 31))
        wait_until(lambda: settled(worker.notes), within=LONG, what="the acknowledgements")
        stats = app.control.inspect([worker.name], timeout=LONG).stats()[worker.name]
        assert stats["pool"]["broker"]["lost_fetches"] == 1


def test_a_warm_shutdown_gives_back_what_has_not_started(app: Celery, start: Start) -> None:
    worker = start(options=("-c", "1"), settings={"worker_prefetch_multiplier": 10})
    sent = [app.send_task("toyapp.late_gate", (f"t{i}",)) for i in range(6)]
    wait_until(lambda: worker.notes.hlen("unacked") == 6, within=LONG, what="six prefetched")
    wait_until(lambda: worker.started("t0"), within=LONG, what="a running task")
    worker.signal(signal.SIGTERM)
    wait_until(lambda: "running tasks to end" in worker.log, within=LONG, what="the warm shutdown")
    worker.open("t0")
    assert worker.wait() == 0
    assert worker.notes.llen("toy") == 5
    assert worker.notes.hlen("unacked") == 0
    for i in range(6):
        worker.open(f"t{i}")
    start(name="w2", options=("-c", "1"))
    assert [r.get(timeout=LONG) for r in sent] == [f"t{i}" for i in range(6)]
    assert worker.notes.lrange("started", 0, -1) == [f"t{i}" for i in range(6)]


def test_acknowledgements_go_out_while_a_warm_shutdown_waits_for_others(
    app: Celery, start: Start
) -> None:
    worker = start()
    for name in ("quick", "slow"):
        app.send_task("toyapp.late_gate", (name,))
    wait_until(lambda: worker.notes.llen("started") == 2, within=LONG, what="two running tasks")
    worker.signal(signal.SIGTERM)
    wait_until(lambda: "running tasks to end" in worker.log, within=LONG, what="the warm shutdown")
    worker.open("quick")
    wait_until(lambda: worker.notes.hlen("unacked") == 1, within=LONG, what="the acknowledgement")
    assert worker.exit_code is None
    worker.open("slow")
    assert worker.wait() == 0
    assert settled(worker.notes)


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_stock_pools_use_the_transport(app: Celery, start: Start, pool: object) -> None:
    worker = start(options=("-P", pool, "-c", "2"), settings={"worker_pool": ""})
    for i in range(200):
        app.send_task("toyapp.count", (str(i),), ignore_result=True)
    wait_until(lambda: len(ran(worker)) == 200, within=LONG, what="200 tasks")
    wait_until(lambda: settled(worker.notes), within=LONG, what="the acknowledgements")
    assert set(ran(worker).values()) == {1}
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0


def test_a_worker_without_client_tracking_looks_often_instead(
    start: Start, own_redis: Callable[..., RedisServer], redis_url: str
) -> None:
    broker: RedisServer = own_redis()
    with client_app(broker.url, redis_url) as app:
        with app.connection_for_write() as connection:
            connection.default_channel.client.execute_command(
                "ACL", "SETUSER", "toy", "on", ">secret", "~*", "&*", "+@all", "-client|tracking"
            )
        url = broker.url.replace("redis://", "redis-batch://toy:secret@")
        worker = start(url)
        for i in range(5):
            assert app.send_task("toyapp.add", (i, 1)).get(timeout=LONG) == i + 1
    assert "does not offer CLIENT TRACKING" in worker.log
