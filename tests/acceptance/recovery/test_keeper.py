"""A keeper alone: what workers do beside steps is done while there is no worker."""

import contextlib
import random
import signal
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil
import pytest
import redis
from support.deadlines import until, wait_until
from support.servers.redis_servers import RedisServer, free_port, short_folder
from support.servers.webhook_receiver import Receiver
from support.workers.fleet_workers import FleetWorker
from support.workers.keeper_process import KeeperProcess

from stepfleet.orchestrator import Agent, AsyncFleet, Fleet
from stepfleet.orchestrator.client.fleet import store_of
from stepfleet.orchestrator.store.batches.schedules import Schedules
from stepfleet.orchestrator.store.keys import KEEPERS, SCHEDULE_TURNS, WORKERS
from stepfleet.worker.testing.scenario import Reply
from stepfleet.worker.testing.server import ModelServer

Start = Callable[..., FleetWorker]
StartKeeper = Callable[..., KeeperProcess]
Hold = Callable[..., tuple[threading.Event, threading.Event]]
LONG = 60.0
QUEUE = "stepfleet"
PLAIN = Agent("plain", model="openai:scripted")
SEED = random.SystemRandom().randrange(2**32)


@pytest.fixture
def start_keeper(redis_url: str) -> Iterator[StartKeeper]:
    """Start real keepers: `start_keeper(name=..., env=...)`, on the session's Redis or another."""
    with contextlib.ExitStack() as cleanup:
        folder: Path = cleanup.enter_context(short_folder())

        def start(url: str = redis_url, *, starts: bool = True, **given: object) -> KeeperProcess:
            keeper = KeeperProcess(folder, url, **given)  # type: ignore[arg-type]
            cleanup.callback(keeper.end)
            return keeper.start() if starts else keeper

        yield start


@pytest.fixture
def seen(redis_url: str) -> Iterator[redis.Redis]:
    """A client that looks at the session's Redis."""
    with contextlib.closing(redis.Redis.from_url(redis_url, decode_responses=True)) as client:
        yield client


async def make_due(store: Schedules, name: str) -> None:
    """Let the newest tick of a schedule have been an hour ago, as while nobody was there."""
    view, now = await store.get(name), await store.now()
    earlier = view.schedule.model_copy(update={"created": now - timedelta(hours=1)})
    await store.change(earlier, now)


def cron() -> str:
    """Return an hourly time at which no tick comes while a test runs."""
    return f"{(datetime.now(UTC).minute + 30) % 60} * * * *"


async def test_a_schedule_fires_without_workers_and_one_that_starts_ends_its_runs(
    model: ModelServer, start_keeper: StartKeeper, start_worker: Start, redis_url: str
) -> None:
    """OPS-03: it counts as no worker, and nothing calls the fleet unattended."""
    model.follow(lambda request: Reply(f"done {request.key}"))
    start_keeper()
    async with AsyncFleet(redis_url) as fleet:
        lines = [{"id": f"{n}", "input": f"line {n}"} for n in range(5)]
        await fleet.schedules.add("hourly", lines, PLAIN, cron=cron())
        store = (await store_of(fleet)).schedules
        await make_due(store, "hourly")

        async def is_submitted() -> bool:
            return (await store.get("hourly")).state.submitted == 1

        await until(is_submitted, within=LONG, what="the batch of the tick")
        (progress,) = await fleet.batches.newest()
        assert (progress.submitted, progress.completed) == (5, 0)
        overview = await fleet.overview()
        assert (overview.workers, [one.alive for one in overview.keepers]) == ((), [True])
        assert overview.unserved == {}
        assert not await fleet.schedules.troubles(await store.all())
        start_worker()
        batch = await fleet.batches.get(progress.batch_id)
        await batch.wait(timeout=LONG)
        assert (await batch.progress()).completed == 5
    assert len(model.requests) == 5


def test_delayed_runs_are_dispatched_without_workers(
    start_keeper: StartKeeper, fleet: Fleet, seen: redis.Redis
) -> None:
    """OPS-03."""
    start_keeper()
    fleet.submit(PLAIN, "later", delay=0.5)
    assert seen.llen(QUEUE) == 0
    wait_until(lambda: seen.llen(QUEUE) == 1, within=LONG, what="its message")


def test_runs_of_a_dead_worker_are_dispatched_again_without_workers(
    model: ModelServer,
    hold: Hold,
    start_keeper: StartKeeper,
    start_worker: Start,
    fleet: Fleet,
    seen: redis.Redis,
) -> None:
    """OPS-03: one that it held, and one that waits for the limit which the first one used."""
    fleet.limits.set("openai:scripted", in_flight=1)
    reached, struck = hold(lambda request: Reply(f"done {request.key}"), 1)
    worker = start_worker(env={"STEPFLEET_LEASE": "2"})
    runs = [fleet.submit(PLAIN, f"q{n}") for n in range(2)]
    assert reached.wait(LONG)
    wait_until(lambda: fleet.overview().limited, within=LONG, what="a run in the limit's line")
    worker.end()
    struck.set()
    seen.delete(QUEUE, "unacked", "unacked_index")
    start_keeper()
    wait_until(lambda: seen.llen(QUEUE) >= 1, within=LONG, what="the dead worker's run")
    start_worker(name="w2")
    assert all(fleet.runs.wait(run, timeout=LONG).success for run in runs)


async def test_events_are_delivered_without_workers(
    start_keeper: StartKeeper, redis_url: str
) -> None:
    """OPS-03."""
    async with Receiver() as receiver:
        keeper = start_keeper(env={"STEPFLEET_WEBHOOKS": f'["{receiver.url}"]'})
        assert "and 1 sinks of events" in keeper.log
        async with AsyncFleet(redis_url) as fleet:
            run = await fleet.submit(PLAIN, "never begun")
            await fleet.runs.cancel(run)

        async def told() -> bool:
            return bool(receiver.of(run))

        await until(told, within=LONG, what="the event of the cancelled run")


async def test_of_two_keepers_one_may_die_at_any_moment(
    model: ModelServer, start_keeper: StartKeeper, start_worker: Start, redis_url: str
) -> None:
    """OPS-03: killed while it submits, one batch with each line once is submitted all the same."""
    draw = random.Random(SEED)
    model.follow(lambda request: Reply(f"done {request.key}"))
    keepers = [start_keeper(name=f"k{n}", starts=False).launch() for n in range(2)]
    pids = {one.pid: one for one in keepers}
    most, dies_at = 300, draw.randrange(300)
    async with AsyncFleet(redis_url) as fleet:
        opened = await store_of(fleet)
        store, connection = opened.schedules, opened.connection

        async def both_report() -> bool:
            return len(await connection.execute("HKEYS", opened.keys.of(KEEPERS))) == 2

        await until(both_report, within=LONG, what="two keepers")
        lines = [{"id": f"{n}", "input": f"line {n}"} for n in range(most)]
        await fleet.schedules.add("big", lines, PLAIN, cron=cron())
        await make_due(store, "big")
        turn = opened.keys.of(f"{SCHEDULE_TURNS}big")

        async def owner() -> int:
            text = await connection.execute("GET", turn)
            return int(text.split(":")[-2]) if text else 0

        pid = await until(owner, within=LONG, what="a keeper that submits")

        async def is_far() -> bool:
            found = await fleet.batches.newest()
            return bool(found) and found[0].submitted >= dies_at

        await until(is_far, within=LONG, what=f"run {dies_at}, seed {SEED}")
        pids[pid].signal(signal.SIGKILL)
        await connection.execute("PEXPIRE", turn, 200)  # as it ends by itself

        async def is_noted() -> bool:
            return (await store.get("big")).state.submitted == 1

        await until(is_noted, within=LONG, what=f"the other keeper's note, seed {SEED}")
        (progress,) = await fleet.batches.newest()
        assert progress.submitted == most, f"seed {SEED}"
        start_worker()
        batch = await fleet.batches.get(progress.batch_id)
        await batch.wait(timeout=LONG)
        assert (await batch.progress()).completed == most
    assert len(model.requests) == most, f"seed {SEED}"


def test_a_keeper_waits_for_redis_tells_so_and_ends_while_redis_is_away(
    own_redis: Callable[..., RedisServer], start_keeper: StartKeeper
) -> None:
    """OPS-03."""
    server = own_redis()
    server.stop()
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    keeper = start_keeper(server.url, starts=False).launch(port)
    wait_until(lambda: "waiting for the store" in keeper.log, within=LONG, what="its wait")
    assert keeper.get("/live", address)[0] == 200, "a restart would not help"
    status, said = keeper.get("/ready", address)
    assert (status, said["ready"]) == (503, False)
    assert "cannot be reached" in said["error"]
    assert keeper.get("/scale", address)[0] == 503
    status, metrics = keeper.get("/metrics", address)
    assert (status, b"stepfleet_store_up 0.0" in metrics) == (200, True)
    server.start()
    wait_until(lambda: keeper.get("/ready", address)[0] == 200, within=LONG, what="Redis")
    with Fleet(server.url) as fleet, redis.Redis.from_url(server.url) as client:
        server.kill()
        server.start()
        fleet.submit(PLAIN, "later", delay=0.1)
        wait_until(lambda: client.llen(QUEUE) == 1, within=LONG, what="the timer after a restart")
        server.kill()

    def shown() -> bool:
        return b"stepfleet_store_up 0.0" in keeper.get("/metrics", address)[1]

    wait_until(shown, within=LONG, what="a page of metrics that shows Redis to be away")
    keeper.signal(signal.SIGTERM)
    assert keeper.wait(within=15.0) == 0


def test_a_keeper_ends_at_once_and_signs_off(
    start_keeper: StartKeeper, seen: redis.Redis, fleet: Fleet
) -> None:
    """OPS-03: its probe, its pages and the fleet's overview show it while it lives."""
    keeper = start_keeper(starts=False).start(cold=True)
    assert keeper.get("/live")[0] == keeper.get("/ready")[0] == 200
    status, metrics = keeper.get("/metrics")
    assert status == 200
    assert b"stepfleet_workers 0.0" in metrics
    assert keeper.get("/nothing")[0] == 404
    assert seen.exists(WORKERS) == 0
    (one,) = fleet.overview().keepers
    assert one.alive
    assert one.name.endswith(f":{keeper.pid}")
    assert psutil.Process(keeper.pid).net_connections("inet")[0].laddr.ip == "127.0.0.1"
    keeper.signal(signal.SIGTERM)
    assert keeper.wait(within=10.0) == 0
    assert seen.exists(KEEPERS) == 0
    assert "Traceback" not in keeper.log


def test_the_keeper_answers_the_signal_for_autoscalers(start_keeper: StartKeeper) -> None:
    """OPS-02: of the queue of steps, or of one that is named."""
    keeper = start_keeper()
    status, signal_now = keeper.get("/scale")
    assert (status, signal_now["work"], signal_now["slots"]) == (200, 0, 0)
    assert keeper.get("/scale?queue=gpu&beside=2")[0] == 200
    for wrong in ("queu=gpu", "queue=gpu&beside=-1", "beside=x", "queue="):
        status, said = keeper.get(f"/scale?{wrong}")
        assert (status, bool(said["error"])) == (400, True)
