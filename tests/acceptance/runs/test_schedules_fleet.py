"""Schedules on real workers: each tick is one batch, whoever submits it and whoever dies."""

import signal
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import islice

from support.deadlines import until
from support.workers.command_line import CommandLine
from support.workers.fleet_workers import FleetWorker

from stepfleet.orchestrator import Agent, AsyncFleet, Fleet
from stepfleet.orchestrator.batches.scheduling import Scheduling, key_of, tick_id, ticks_after
from stepfleet.orchestrator.client.fleet import store_of
from stepfleet.orchestrator.store.batches.batches import id_of_keyed_batch, run_id_of
from stepfleet.orchestrator.store.keys import SCHEDULE_TURNS
from stepfleet.worker.testing.scenario import Reply
from stepfleet.worker.testing.server import ModelServer

Start = Callable[..., FleetWorker]
LINES = [{"id": f"{n}", "input": f"line {n}"} for n in range(20)]
LONG = 60.0


async def test_each_tick_is_one_batch_over_dead_owners_and_clocks(
    model: ModelServer, start_worker: Start, redis_url: str
) -> None:
    """Of three ticks one was submitted by a worker that died before it could note that."""
    model.follow(lambda request: Reply(f"done {request.key}", latency=0.01))
    agent = Agent("plain", model="openai:scripted")
    async with AsyncFleet(redis_url) as fleet:
        # No tick of its own comes while the test runs.
        cron = f"{(datetime.now(UTC).minute + 30) % 60} * * * *"
        await fleet.schedules.add("hourly", LINES, agent, cron=cron, missed="all")
        opened = await store_of(fleet)
        store = opened.schedules
        view, now = await store.get("hourly"), await store.now()
        since = now - timedelta(hours=3)
        past = view.schedule.model_copy(update={"created": since})
        ticks = [one for one in islice(ticks_after(cron, "UTC", since), 3) if one <= now]
        assert len(ticks) == 3
        await Scheduling(opened).submit(past, ticks[0])
        assert await store.take("hourly")  # by one that is dead: its turn runs out
        turn = opened.keys.of(f"{SCHEDULE_TURNS}hourly")
        await opened.connection.execute("PEXPIRE", turn, 1000)
        await store.change(past, now - timedelta(hours=1))
        start_worker()
        ids = [id_of_keyed_batch(key_of("hourly", tick_id(one))) for one in ticks]

        async def submitted() -> int:
            return (await store.get("hourly")).state.submitted

        async def all_submitted() -> bool:
            return await submitted() >= 3

        await until(all_submitted, within=LONG, what="the batches of all ticks")
        batches = [await fleet.batches.get(one) for one in ids]
        for batch in batches:
            await batch.wait(timeout=LONG)
        assert [(await one.progress()).completed for one in batches] == [20, 20, 20]
        assert len(await fleet.batches.newest(10)) == 3
        after = await store.get("hourly")
        assert after.state.last_tick == ticks[-1]
        assert after.next_tick is not None
        assert after.next_tick > now
    assert len(model.requests) == 60


async def test_an_owner_that_is_killed_while_it_submits_leaves_one_whole_batch(
    start_worker: Start, redis_url: str
) -> None:
    """SIGKILL in the midst of a tick: the other worker completes that batch, and no other one."""
    lines = [{"id": f"{n}", "input": "x"} for n in range(5_000)]
    workers = {one.pid: one for one in (start_worker(name=f"w{n}") for n in range(2))}
    async with AsyncFleet(redis_url) as fleet:
        await fleet.pause()  # batches are submitted; their runs wait
        cron = f"{(datetime.now(UTC).minute + 30) % 60} * * * *"
        agent = Agent("plain", model="openai:scripted")
        await fleet.schedules.add("big", lines, agent, cron=cron)
        opened = await store_of(fleet)
        connection, keys = opened.connection, opened.keys
        store, turn = opened.schedules, keys.of(f"{SCHEDULE_TURNS}big")
        view, now = await store.get("big"), await store.now()
        earlier = view.schedule.model_copy(update={"created": now - timedelta(hours=1)})
        tick = next(ticks_after(cron, "UTC", earlier.created))
        await store.change(earlier, now)
        first = run_id_of(id_of_keyed_batch(key_of("big", tick_id(tick))), 0)

        async def submits() -> bool:
            return bool(await connection.execute("EXISTS", keys.run(first)))

        async def is_noted() -> bool:
            return (await store.get("big")).state.submitted == 1

        await until(submits, within=LONG, what="the first run of the tick")
        owner = int((await connection.execute("GET", turn)).split(":")[-2])
        workers[owner].signal(signal.SIGKILL)
        batch = await fleet.batches.get(id_of_keyed_batch(key_of("big", tick_id(tick))))
        before = await batch.progress()
        assert not await is_noted()
        assert await connection.execute("PEXPIRE", turn, 500)  # as it ends by itself
        await until(is_noted, within=LONG, what="the other worker's note")
        after = await batch.progress()
        assert before.submitted < 5_000 == after.submitted == after.open
        assert [one.batch_id for one in await fleet.batches.newest(10)] == [batch.id]


def test_the_command_line_adds_lists_runs_and_removes(
    model: ModelServer, start_worker: Start, redis_url: str, commands: CommandLine
) -> None:
    cli = partial(commands, STEPFLEET_REDIS_URL=redis_url)
    model.follow(lambda _: Reply("fine", latency=0.01))
    start_worker()
    file = commands.questions("a", "b")
    added = cli("schedule", "add", "morning", file, "--cron", "0 6 * * *", "--agent", "plain")
    assert "morning: 2 lines for agent plain, next" in added.stdout
    twice = cli("schedule", "add", "morning", file, "--cron", "0 6 * * *", "--agent", "plain")
    assert twice.returncode == 2
    assert "remove it first" in twice.stderr
    bad = cli("schedule", "add", "x", file, "--cron", "0 66 * * *", "--agent", "plain")
    assert "Bad hour" in bad.stderr
    commands.write("bad.jsonl", '{"id": "a", "input": "x"}\nnonsense\n{"id": "c"}\n')
    wrong = cli("schedule", "add", "x", "bad.jsonl", "--cron", "@daily", "--agent", "plain")
    assert wrong.returncode == 2
    for named in ("bad.jsonl: 2 of 3 lines cannot be used", "line 2:", "line 3:"):
        assert named in wrong.stderr
    ran = cli("schedule", "run-now", "morning").stdout
    batch = ran.rsplit(" ", 1)[1].strip()
    with Fleet(redis_url) as fleet:
        assert fleet.batches.get(batch).wait(timeout=LONG).completed == 2
    times = ("--cron", "@every 2h", "--tz", "Europe/Berlin", "--jitter", "5m")
    own = ("--limit", "in_flight=3", "--priority", "low", "--tenant", "acme")
    assert "next" in cli("schedule", "add", "often", file, *times, *own, "--agent", "plain").stdout
    shown = cli("schedule", "show", "often").stdout
    for named in ("@every 2h", "5 min 00 s", "in_flight=3", "low", "acme", "then"):
        assert named in shown
    (following,) = (one[4:].strip() for one in shown.splitlines() if one.startswith("next"))
    assert shown.count(following) == 1  # those behind `then` are later
    long = cli("schedule", "add", "x", file, "--cron", "@daily", "--jitter", "5 years")
    assert "--jitter is '5 years'" in long.stderr
    assert "paused" in cli("schedule", "pause", "morning").stdout
    assert "paused" in cli("schedule", "list").stdout
    assert "next" in cli("schedule", "resume", "morning").stdout
    assert "removed" in cli("schedule", "remove", "morning").stdout
    gone = cli("schedule", "show", "morning")
    assert "there is no schedule" in gone.stderr
