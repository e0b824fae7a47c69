"""Runs whose records are packed: what they take in Redis, and that they are read as plain ones."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from support.runs.packed_records import as_version_1, hidden
from support.runs.stored_runs import Bench, answered, bench, called, plain_agent
from support.runs.waits import let_pass
from support.servers.redis_servers import RedisServer

from stepfleet.orchestrator import AsyncFleet
from stepfleet.orchestrator.errors import SerializationError
from stepfleet.orchestrator.protocol.claim import Claim, Refused, Work
from stepfleet.orchestrator.protocol.commit_events import events_of
from stepfleet.orchestrator.protocol.verdict import Facts
from stepfleet.orchestrator.store.compression import LARGEST, packed
from stepfleet.orchestrator.store.feeds import FeedPosition

PARTS = ("", ":log", ":outcomes", ":events", ":journal", ":lost")
OF_AN_OPEN_STEP = {"lease", "leased_at", "elapsed", "dispatches", "logged"}


BENCH: dict[str, Any] = {"agent": plain_agent(max_steps=100), "grace": 60}


async def taken(desk: Bench, run_id: str) -> int:
    """Return the bytes that Redis takes for a run."""
    key, execute = desk.opened.keys.run(run_id), desk.opened.connection.execute
    sizes = [await execute("MEMORY", "USAGE", f"{key}{part}", "SAMPLES", 0) for part in PARTS]
    return sum(size or 0 for size in sizes)


async def drive(desk: Bench, run_id: str, steps: int, *, ends: bool = True) -> None:
    """Commit the run's remaining steps up to `steps`; the last one is its answer if it `ends`."""
    for step in range((await desk.stored(run_id)).step, steps):
        claim = await desk.claim(run_id, step)
        is_last = ends and step == steps - 1
        await desk.commit(claim, answered(claim) if is_last else called(claim))


@pytest.mark.parametrize("steps", [5, 20])
async def test_an_ended_run_takes_a_third_of_what_plain_records_take(
    desk: Bench, steps: int
) -> None:
    """With the private server's settings of streams."""
    setting = ("CONFIG", "SET", "stream-node-max-bytes")
    await desk.opened.connection.execute(*setting, 1024)
    run_id = await desk.create()
    await drive(desk, run_id, steps)
    now = await taken(desk, run_id)
    await as_version_1(desk.opened.connection, desk.opened.keys.run(run_id))
    before = await taken(desk, run_id)
    await desk.opened.connection.execute(*setting, 4096)
    assert now <= before / 3, f"{now} bytes, plain ones {before}"


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ({}, 8_000),
        (
            {
                "stream-node-max-bytes": 1024,
                "hash-max-listpack-value": 512,
                "hash-max-listpack-entries": 128,
            },
            6_000,
        ),
    ],
)
async def test_an_ended_run_keeps_no_room_to_grow(
    own_redis: Callable[..., RedisServer], settings: dict[str, int], most: int
) -> None:
    """By Redis's own settings, and by those of the private server."""
    server = own_redis()
    async with bench(server.url, plain_agent()) as desk:
        for name, value in settings.items():
            await desk.opened.connection.execute("CONFIG", "SET", name, value)
        run_id = await desk.create(batch="")
        await drive(desk, run_id, 4, ends=False)
        before = await desk.header(run_id)
        events = await desk.opened.connection.execute(
            "XLEN", f"{desk.opened.keys.run(run_id)}:events"
        )
        await drive(desk, run_id, 5)
        assert await taken(desk, run_id) <= most
        after = await desk.header(run_id)
        assert before.keys() - after.keys() == OF_AN_OPEN_STEP
        assert (after["batch"], after["created"]) == (before["batch"], before["created"])
        told = await desk.opened.connection.execute(
            "XLEN", f"{desk.opened.keys.run(run_id)}:events"
        )
        assert told > events
        keys = await desk.opened.connection.execute("KEYS", "*:spare*")
        assert keys == []
        left = await desk.opened.connection.execute("PTTL", desk.opened.keys.run(run_id))
        assert left > 0
        await desk.stored(run_id)


async def test_what_scripts_look_into_stays_plain(desk: Bench) -> None:
    """The state of an active run, and what it was given."""
    run_id = await desk.create()
    claim = await desk.claim(run_id)
    await desk.commit(claim, called(claim))
    key, execute = desk.opened.keys.run(run_id), desk.opened.connection.execute
    assert (await desk.header(run_id))["slim"].startswith("{")
    log = await execute("HGETALL", f"{key}:log")
    assert log["input:0"].startswith("[")
    assert not log["0"].startswith("{")


async def test_envelopes_are_those_that_were_told_for_readers_and_couriers(desk: Bench) -> None:
    """The events of commits, and of scripts, with their numbers."""
    feeds = desk.opened.feeds
    await feeds.switch_on()
    run_id = await desk.create()
    told: list[dict[str, Any]] = []
    for step in range(3):
        claim = await desk.claim(run_id, step)
        attempt = answered(claim) if step == 2 else called(claim)
        verdict = desk.verdict(claim, attempt)
        events = events_of(claim, attempt, verdict, Facts(claim.now + timedelta(seconds=1)))
        told += [event.to_dict() for event in events]
        await desk.steps.commit(claim, verdict, events)
    found, _ = await desk.runs.events(run_id)
    assert [one["sequence"] for one in found] == list(range(1, len(told) + 3))
    assert {one["event_id"] for one in found} == {
        f"{run_id}:{number + 1}" for number in range(len(found))
    }
    bare = [{name: one[name] for name in told[0]} for one in found]
    assert bare[2:] == told
    assert [one["payload"]["status"] for one in bare[:2]] == ["queued", "in_progress"]
    pages = await feeds.read(
        {shard: FeedPosition() for shard in range(desk.opened.keys.shards)}, 100
    )
    assert [one for page in pages for one in page.envelopes] == found


async def test_a_bomb_in_a_record_harms_neither_worker_nor_client(
    desk: Bench, redis_url: str
) -> None:
    run_id = await desk.create()
    claim = await desk.claim(run_id)
    await desk.commit(claim, called(claim))
    bomb = packed(f'["{" " * (LARGEST - 4)}"]')
    assert len(bomb) < 10_000
    key = f"{desk.opened.keys.run(run_id)}:log"
    for hostile in (bomb, bomb[:-4], "b" + bomb[1:]):
        await desk.opened.connection.execute("HSET", key, 0, hostile)
        refusal = await desk.refused(run_id, step=1)
        assert refusal.why is Refused.UNREADABLE
        async with AsyncFleet(redis_url) as fleet:
            with pytest.raises(SerializationError, match="cannot be read"):
                await fleet.runs.show(run_id)
        await let_pass(desk, run_id)
    assert (await desk.header(run_id))["token"] == ""
    assert await desk.due(run_id) is not None


async def test_a_long_history_is_claimed_whole(desk: Bench) -> None:
    """What was packed step by step is one conversation again."""
    run_id = await desk.create()
    await drive(desk, run_id, 60, ends=False)
    claim = await desk.steps.claim(Work(run_id, 60), desk.token())
    assert isinstance(claim, Claim)
    assert len(claim.state.messages) == 2 + 2 * 60
    assert [call.result for call in claim.state.tool_results] == list(range(60))
    key, execute = desk.opened.keys.run(run_id), desk.opened.connection.execute
    assert "looking" in hidden(await execute("HGETALL", f"{key}:log"))
