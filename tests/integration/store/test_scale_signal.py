"""What is work for workers and what is not, on a real Redis."""

import asyncio
from dataclasses import replace
from typing import Any

import orjson
import pytest
from support.deadlines import until
from support.runs.asking_runs import asks, clerk, waiting, worked_on
from support.runs.heavy_calls import HEAVY, ONE, render
from support.runs.opened_runs import Opened, lease_runs_out
from support.runs.scripted_steps import Script, call, say
from support.runs.stored_runs import Bench, with_settings
from support.servers.redis_cluster import RedisCluster

from stepfleet.orchestrator import Agent, AsyncFleet, ConfigurationError, tool
from stepfleet.orchestrator.errors import ModelError
from stepfleet.orchestrator.records.errors import ModelErrorCode
from stepfleet.orchestrator.settings.settings import load_settings
from stepfleet.orchestrator.store.circuits import Circuits
from stepfleet.orchestrator.store.fleet import demand
from stepfleet.orchestrator.store.fleet.figures import fleet_figures
from stepfleet.orchestrator.store.fleet.scale import scale_signal
from stepfleet.orchestrator.store.keys import LIMIT_WAITING, SCALE, WORKERS
from stepfleet.orchestrator.store.store import Store
from stepfleet.worker.runtime.circuits import CircuitBreaker

PLAIN = Agent("plain", model="openai:m")


async def queued(fleet: AsyncFleet, runs: int, **options: Any) -> Any:
    rows = [{"id": f"{n}", "input": "hello"} for n in range(runs)]
    return await fleet.submit_batch(rows, PLAIN, **options)


def store_of(fleet: AsyncFleet) -> Any:
    return fleet._session.store()


async def numbers(fleet: AsyncFleet, **which: Any) -> tuple[int, int, dict[str, int]]:
    """Return work, workers wanted for a slot each, and what waits."""
    found = await fleet.scale(slots_per_worker=1, **which)
    assert found.work == found.queued + found.due_soon + found.in_hand
    return found.work, found.wanted, found.waits


async def test_a_burst_is_work_as_a_whole(
    fleet: AsyncFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OPS-02: 2,000 queued runs; a look at a tenth of them finds as many."""
    await queued(fleet, 2000)
    found = await fleet.scale()
    assert (found.work, found.queued, found.in_hand, found.estimated) == (2000, 2000, 0, False)
    assert (found.workers, found.slots, found.slots_per_worker, found.wanted) == (0, 0, 1000, 2)
    assert (await fleet.scale(slots_per_worker=30)).wanted == 67
    assert (await fleet.scale(slots_per_worker=30, beside=60)).wanted == 7
    assert (await fleet.scale(beside=3)).wanted == 0
    monkeypatch.setattr(demand, "MOST_LOOKED_AT", 200)
    some = await fleet.scale()
    assert some == found.model_copy(update={"estimated": True})


async def test_an_idle_fleet_wants_nobody(fleet: AsyncFleet) -> None:
    """OPS-02"""
    assert await numbers(fleet) == (0, 0, {})
    with pytest.raises(ConfigurationError, match="1 or more"):
        await fleet.scale(slots_per_worker=0)
    with pytest.raises(ConfigurationError, match="beside"):
        await fleet.scale(beside=-1)
    with pytest.raises(ConfigurationError, match="queue is empty"):
        await fleet.scale(queue="")


async def test_one_step_is_not_missed_among_many_that_wait(
    fleet: AsyncFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OPS-02: a sample may miss it; the message in the queue shows it."""
    await asyncio.gather(*(fleet.submit(PLAIN, "hello", delay=900) for _ in range(300)))
    store = await store_of(fleet)
    soon = (await store.connection.read_clock()).timestamp() * 1000 + 10_000
    for shard in range(store.keys.shards):  # as if each were to be looked at soon
        due = store.keys.due(shard)
        for run_id in await store.connection.execute("ZRANGE", due, 0, -1):
            await store.connection.execute("ZADD", due, soon, run_id)
    await fleet.submit(PLAIN, "hello")
    monkeypatch.setattr(demand, "MOST_LOOKED_AT", 100)
    found = await fleet.scale()
    assert found.estimated
    assert (found.work > 0, found.wanted) == (True, 1)


@pytest.mark.parametrize(
    ("name", "limit", "work"),
    [
        ("openai:m", {"in_flight": 50}, 50),
        ("openai:m", {"requests_per_minute": 60}, 61),
        ("openai:*", {"in_flight": 7}, 7),
        ("tenant:*", {"in_flight": 5}, 5),
        ("agent:plain", {"starts_per_minute": 30}, 31),
        ("openai:other", {"in_flight": 1}, 300),
    ],
)
async def test_a_throttled_fleet_does_not_scale(
    fleet: AsyncFleet, name: str, limit: dict[str, Any], work: int
) -> None:
    """OPS-02: however long the queue is, before any worker has seen it."""
    await fleet.limits.set(name, **limit)
    await queued(fleet, 300, tenant="acme")
    waits = {"limits": 300 - work} if work < 300 else {}
    assert await numbers(fleet) == (work, work, waits)


async def test_a_budget_on_hold_is_not_work(fleet: AsyncFleet) -> None:
    """OPS-02: nor is what waits in its line; raised, all of it is work."""
    await fleet.limits.set("tenant:acme", calls=1, on_budget="hold")
    store = await store_of(fleet)
    await store.connection.execute(
        "HSET", store.keys.of("sf:{limits}:spent"), "tenant:acme", "0 0 1 0 20000"
    )
    await queued(fleet, 5, tenant="acme")
    assert await numbers(fleet) == (0, 0, {"limits": 5})
    await fleet.limits.set("tenant:acme", calls=100)
    assert await numbers(fleet) == (5, 5, {})


async def test_what_waits_in_a_line_is_work_as_far_as_a_minute_has_room(
    fleet: AsyncFleet, redis_url: str
) -> None:
    """OPS-02: a slow batch keeps a worker; what is paused meanwhile is counted once, as paused."""
    agent = Agent("plain", model=Script([say("done")]))
    await fleet.limits.set(agent.config.model, requests_per_minute=12)
    batch = await fleet.submit_batch([{"id": f"{n}", "input": "x"} for n in range(40)], agent)
    store = await store_of(fleet)
    ids = [one.run_id for one in (await fleet.runs.page(limit=40)).runs]
    async with worked_on(redis_url, agent, *ids):
        lined = ("HLEN", store.keys.of(LIMIT_WAITING))
        await until(lambda: at_least(store, lined, 20), what="a line")
    found = await fleet.scale(slots_per_worker=1)
    assert 1 <= found.wanted <= 13
    assert found.waits["limits"] + found.work == (await fleet.overview()).active
    await batch.pause()
    assert await numbers(fleet) == (0, 0, {"paused": found.waits["limits"] + found.work})


async def at_least(store: Store, count: tuple[str, str], least: int) -> bool:
    return int(await store.connection.execute(*count)) >= least


async def test_people_and_children_are_not_work(fleet: AsyncFleet, redis_url: str) -> None:
    """OPS-02"""
    cashier = clerk(asks(7))
    manager = Agent("manager", model=Script([call(("clerk", {"input": "y"}))]), agents=[cashier])
    await fleet.submit(manager, "begin")
    (top,) = [one.run_id for one in (await fleet.runs.page()).runs]
    async with worked_on(redis_url, manager, top):
        await waiting(fleet, 1)
        await until(lambda: idle(fleet), what="nothing in hand")
    assert await numbers(fleet) == (0, 0, {"children": 1, "people": 1})


async def idle(fleet: AsyncFleet) -> bool:
    return (await fleet.scale()).work == 0


async def test_a_child_that_nobody_has_started_is_work(opened: Opened) -> None:
    """OPS-02: its parent waits for it, and its worker died before it could start it."""
    child = Agent("child", model=Script([say("done")]))
    async with opened(call(("child", {"input": "y"})), agents=[child]) as (desk, hands, run_id):
        await hands.step(run_id, 0)
        found = await signal(desk)
        assert (found.queued, found.waits) == (1, {})


async def test_an_open_circuit_is_not_work(opened: Opened) -> None:
    """OPS-02"""
    out = ModelError("no connection", retryable=True, code=ModelErrorCode.CONNECTION_ERROR)
    async with opened(out) as (desk, hands, run_id):
        circuits: Circuits = with_settings(desk.opened, rescue_interval=0.0).circuits
        breaker = CircuitBreaker(circuits, 1)
        ports = replace(hands.ports(), circuits=breaker, outage_patience=86_400.0)
        hands.ports = lambda: ports  # type: ignore[method-assign]
        await hands.step(run_id, 0)
        found = await signal(desk)
        assert (found.work, found.wanted, found.waits) == (0, 0, {"circuits": 1})
        await breaker.look()
        assert (await signal(desk)).queued == 1  # a probe


async def signal(desk: Bench, queue: str | None = None) -> Any:
    return await scale_signal(desk.opened, queue, slots_per_worker=1)


async def test_pauses_are_not_work(fleet: AsyncFleet) -> None:
    """OPS-02: of a batch, also before its runs have learned of it; of a run; of the fleet."""
    batch = await queued(fleet, 10)
    store = await store_of(fleet)
    alone = await fleet.submit(PLAIN, "hello")
    assert await numbers(fleet) == (11, 11, {})
    for shard in range(store.keys.shards):
        flag = (store.keys.flags(shard), f"b:{batch.id}", "pause 7")
        await store.connection.execute("HSET", *flag)
    assert await numbers(fleet) == (1, 1, {"paused": 10})
    for shard in range(store.keys.shards):
        await store.connection.execute("DEL", store.keys.flags(shard))
    await batch.pause()
    await fleet.runs.pause(alone)
    assert await numbers(fleet) == (0, 0, {"paused": 11})
    await batch.resume()
    assert await numbers(fleet) == (10, 10, {"paused": 1})
    await fleet.pause()
    assert await numbers(fleet) == (0, 0, {"paused": 11})


async def test_a_delay_is_work_a_minute_before_its_end(fleet: AsyncFleet) -> None:
    """OPS-02"""
    await fleet.submit(PLAIN, "hello", delay=600)
    first = await fleet.submit(PLAIN, "hello", delay=30)
    await fleet.submit(PLAIN, "hello", after=[first])
    found = await fleet.scale()
    assert (found.work, found.due_soon, found.waits) == (1, 1, {"delays": 1, "runs": 1})


async def test_a_queue_of_tools_has_its_own_work(opened: Opened) -> None:
    """OPS-02, MULTI-08: a call counts there until it is delivered, its step only then."""
    began, ends = asyncio.Event(), asyncio.Event()

    @tool(queue=HEAVY)
    async def held(what: str) -> str:
        """Take until the test says so."""
        began.set()
        await ends.wait()
        return what

    answers = (call(("held", {"what": "a"})), say("done"))
    async with opened(*answers, tools=(held,)) as (desk, hands, run_id):
        await hands.step(run_id, 0)
        steps, calls = await signal(desk), await signal(desk, HEAVY)
        assert (steps.work, steps.wanted, steps.waits) == (0, 0, {"tools": 1})
        assert (calls.work, calls.queued, calls.in_hand, calls.wanted) == (1, 1, 0, 1)
        made = asyncio.create_task(hands.call(run_id, 0, 0))
        await began.wait()
        calls = await signal(desk, HEAVY)
        assert (calls.work, calls.queued, calls.in_hand) == (1, 0, 1)
        ends.set()
        await made
        assert ((await signal(desk)).queued, (await signal(desk, HEAVY)).work) == (1, 0)


async def test_a_step_is_in_hand_until_its_lease_ends(opened: Opened) -> None:
    """OPS-02: a lost worker's steps are work for others."""
    async with opened(*ONE, tools=(render,)) as (desk, _, run_id):
        await desk.claim(run_id)
        found = await signal(desk)
        assert (found.work, found.in_hand) == (1, 1)
        await lease_runs_out(desk, run_id)
        found = await signal(desk)
        assert (found.work, found.in_hand, found.queued) == (1, 0, 1)


async def test_all_who_show_metrics_share_one_reading(redis_url: str, fleet: AsyncFleet) -> None:
    """OPS-02: by queue; a later version's further fields do no harm."""
    store: Store = await store_of(fleet)
    await queued(fleet, 3)
    figures = await fleet_figures(store)
    assert (figures.work, figures.capacity) == ({"stepfleet": 3}, {"stepfleet": 0})
    await queued(fleet, 4)
    assert (await fleet_figures(store)).work == {"stepfleet": 3}
    text = await store.connection.execute("GET", SCALE)
    later = text.replace('"estimated":', '"new":1,"estimated":')
    await store.connection.execute("SET", SCALE, later, "KEEPTTL")
    assert (await fleet_figures(store)).work == {"stepfleet": 3}
    assert 0 < await store.connection.execute("PTTL", SCALE) <= 8000
    await store.connection.execute("DEL", SCALE)
    assert (await fleet_figures(store)).work == {"stepfleet": 7}


async def test_a_cluster_has_the_signal_too(cluster: RedisCluster, redis_url: str) -> None:
    """OPS-02"""
    settings = load_settings(redis_url=cluster.url, broker_url=redis_url, prefix="scale:")
    async with AsyncFleet(settings=settings) as fleet:
        await fleet.limits.set("openai:m", in_flight=2)
        await queued(fleet, 5)
        assert await numbers(fleet) == (2, 2, {"limits": 3})


async def test_workers_that_are_silent_are_no_capacity(fleet: AsyncFleet) -> None:
    """OPS-02: whatever became of them; one that stops takes no new steps."""
    store: Store = await store_of(fleet)
    await queued(fleet, 45)
    now = (await store.connection.read_clock()).timestamp()
    half_a_lease = store.settings.lease / 2
    for name, ago, stops in (("a", 0.0, False), ("b", half_a_lease + 1, False), ("c", 0.0, True)):
        told = {"name": name, "seen": now - ago, "slots": 20, "queues": ["stepfleet"]}
        report = orjson.dumps({**told, "stopping": stops}).decode()
        await store.connection.execute(
            "HSET", store.keys.of(WORKERS), f"elsewhere-{name}:1", report
        )
    found = await fleet.scale()
    assert (found.workers, found.slots, found.slots_per_worker, found.wanted) == (1, 20, 20, 3)
