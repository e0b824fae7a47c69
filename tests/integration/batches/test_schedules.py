"""Schedules in the store: added whole, never lost, and each looked at by itself."""

import asyncio
from datetime import datetime, timedelta
from typing import Any

import pytest

from stepfleet.orchestrator import Agent, AsyncFleet, ConfigurationError
from stepfleet.orchestrator.batches.scheduling import Scheduling
from stepfleet.orchestrator.store.batches.schedules import TURN_MS, Schedules
from stepfleet.orchestrator.store.keys import SCHEDULE_TURNS, SCHEDULES, USED
from stepfleet.orchestrator.store.records.codec import milliseconds, moment

LINES = [{"id": f"{n}", "input": "x"} for n in range(3)]
AGENT = Agent("plain", model="openai:none")


async def opened(fleet: AsyncFleet) -> tuple[Schedules, Scheduling]:
    store = (await fleet._session.open()).store
    return Schedules(store.connection, store.keys), Scheduling(store)


async def make_due(store: Schedules, name: str, hours: int) -> None:
    """Let a schedule have been added some hours ago."""
    view = await store.get(name)
    now = await store.now()
    earlier = view.schedule.model_copy(update={"created": now - timedelta(hours=hours)})
    await store.change(earlier, now)


async def test_two_at_once_make_one_schedule_with_its_own_lines(fleet: AsyncFleet) -> None:
    add = fleet.schedules.add
    made = await asyncio.gather(
        *(add("s", LINES, AGENT, cron="@daily") for _ in range(4)), return_exceptions=True
    )
    refused = [one for one in made if isinstance(one, ConfigurationError)]
    assert len(refused) == 3
    store, _ = await opened(fleet)
    (view,) = await store.all()
    assert len(await store.rows(view.schedule)) == view.schedule.rows == 3


async def test_what_this_worker_cannot_read_stays_and_others_go_on(fleet: AsyncFleet) -> None:
    await fleet.schedules.add("broken", LINES, AGENT, cron="@daily")
    await fleet.schedules.add("good", LINES, AGENT, cron="@hourly")
    store, scheduling = await opened(fleet)
    await make_due(store, "good", 2)
    client = await fleet._session.open()
    key = client.store.keys.of(SCHEDULES)
    await client.store.connection.execute("HSET", key, "broken", '{"from": "a newer version"}')
    await scheduling.look("broken")
    assert await store.is_there("broken")
    assert [one.schedule.name for one in await fleet.schedules.all()] == ["good"]
    await scheduling.look("good")
    assert (await store.get("good")).state.submitted == 1
    await fleet.schedules.remove("broken")
    assert not await store.is_there("broken")


async def test_a_forgotten_configuration_is_stored_again(fleet: AsyncFleet) -> None:
    await fleet.schedules.add("s", LINES, AGENT, cron="@hourly")
    store, scheduling = await opened(fleet)
    await make_due(store, "s", 2)
    client = await fleet._session.open()
    for name in ("sf:agents", USED):
        await client.store.connection.execute("DEL", client.store.keys.of(name))
    await scheduling.look("s")
    view = await store.get("s")
    assert (view.state.submitted, view.state.error) == (1, None)


async def test_a_removed_schedule_is_not_brought_back(fleet: AsyncFleet) -> None:
    await fleet.schedules.add("s", LINES, AGENT, cron="@hourly")
    store, _ = await opened(fleet)
    view, now = await store.get("s"), await store.now()
    await fleet.schedules.remove("s")
    await store.change(view.schedule, now)
    await store.note("s", view.state, now)
    assert await fleet.schedules.all() == []
    assert (await store.due())[0] == []


async def test_ticks_that_are_left_out_are_counted_once(fleet: AsyncFleet) -> None:
    await fleet.schedules.add("s", LINES, AGENT, cron="@hourly")
    store, scheduling = await opened(fleet)
    await make_due(store, "s", 5)
    client = await fleet._session.open()
    view = await store.get("s")
    rows = client.store.keys.of(f"sf:{{schedules}}:rows:{view.schedule.rows_key}")
    await client.store.connection.execute("LPOP", rows)
    for _ in range(3):
        await scheduling.look("s")
    state = (await store.get("s")).state
    assert state.error is not None
    assert "2 of its 3 lines" in state.error
    assert (state.skipped, state.tries, state.submitted) == (4, 3, 0)


@pytest.mark.parametrize("field", ["limit", "only_new", "after"])
async def test_what_is_of_one_batch_is_refused(fleet: AsyncFleet, field: str) -> None:
    given = {"limit": {"in_flight": 1}, "only_new": True, "after": "another run"}[field]
    options: dict[str, Any] = {field: given}
    with pytest.raises(ConfigurationError, match=field):
        await fleet.schedules.add("s", LINES, AGENT, cron="@daily", **options)


async def test_an_owner_whose_turn_has_ended_can_do_no_harm(fleet: AsyncFleet) -> None:
    """It neither ends the turn of the next owner nor writes over what that one has noted."""
    await fleet.schedules.add("s", LINES, AGENT, cron="@hourly")
    slow, _ = await opened(fleet)
    quick, _ = await opened(fleet)
    view, now = await slow.get("s"), await slow.now()
    client = await fleet._session.open()
    turn = client.store.keys.of(f"{SCHEDULE_TURNS}s")
    assert await slow.take("s")
    assert not await quick.take("s")
    assert await slow.hold("s")
    await client.store.connection.execute("DEL", turn)  # as it ends by itself
    assert await quick.take("s")
    assert await quick.note("s", view.state.model_copy(update={"submitted": 2}), now)
    assert not await slow.note("s", view.state.model_copy(update={"submitted": 1}), now)
    await slow.look_at("s", now + timedelta(days=1))
    assert not await slow.hold("s")
    await slow.release("s")
    assert await quick.hold("s")
    after = await slow.get("s")
    assert (after.state.submitted, after.next_tick) == (2, view_time(now))
    await quick.release("s")
    assert await slow.take("s")


async def test_a_turn_from_before_the_clock_was_set_back_is_nobodys(fleet: AsyncFleet) -> None:
    await fleet.schedules.add("s", LINES, AGENT, cron="@hourly")
    dead, _ = await opened(fleet)
    other, _ = await opened(fleet)
    client = await fleet._session.open()
    assert await dead.take("s")
    turn = client.store.keys.of(f"{SCHEDULE_TURNS}s")
    # Its end is a time of the clock before.
    await client.store.connection.execute("PEXPIRE", turn, TURN_MS + 3_600_000)
    assert await other.take("s")
    assert not await dead.hold("s")


async def test_bad_lines_are_refused_before_anything_is_stored(fleet: AsyncFleet) -> None:
    lines = [{"id": "a", "input": "x"}, {"id": "a", "input": "y"}, {"id": "c"}]
    with pytest.raises(ConfigurationError, match="2 of 3 lines cannot be used") as refused:
        await fleet.schedules.add("s", lines, AGENT, cron="@daily")
    assert "line 2: field 'id'" in refused.value.message
    assert await fleet.schedules.all() == []


async def test_each_run_now_is_a_batch(fleet: AsyncFleet) -> None:
    await fleet.schedules.add("s", LINES, AGENT, cron="@daily")
    made = await asyncio.gather(*(fleet.schedules.run_now("s") for _ in range(3)))
    assert len({one.id for one in made}) == 3


def view_time(now: datetime) -> datetime:
    """Return a time as Redis keeps it, in milliseconds."""
    return moment(str(milliseconds(now)))
