"""Schedules in the store: added whole, never lost, and each looked at by itself."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from stepfleet.orchestrator import Agent, AsyncFleet, ConfigurationError
from stepfleet.orchestrator.batches.scheduling import Scheduling
from stepfleet.orchestrator.client.fleet import store_of
from stepfleet.orchestrator.store.batches.batches import run_id_of
from stepfleet.orchestrator.store.batches.schedules import TURN_MS, Schedules
from stepfleet.orchestrator.store.codec import milliseconds, moment
from stepfleet.orchestrator.store.fleet.checks import fleet_checks, read_fleet
from stepfleet.orchestrator.store.fleet.figures import fleet_figures
from stepfleet.orchestrator.store.keys import SCHEDULE_TURNS, SCHEDULES, USED
from stepfleet.orchestrator.store.runs.submission import NewRun, RunSubmission

LINES = [{"id": f"{n}", "input": "x"} for n in range(3)]
AGENT = Agent("plain", model="openai:none")


async def opened(fleet: AsyncFleet) -> tuple[Schedules, Scheduling]:
    """Return the schedules of two further workers."""
    store = await store_of(fleet)
    return replace(store).schedules, Scheduling(replace(store))


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


async def test_a_worker_that_found_no_schedule_removes_none_that_was_added_since(
    fleet: AsyncFleet,
) -> None:
    await fleet.schedules.add("s", LINES, AGENT, cron="@daily")
    store, _ = await opened(fleet)
    await store.forget("s")
    view = await store.get("s")
    assert len(await store.rows(view.schedule)) == 3
    await store.remove("s")
    assert await fleet.schedules.all() == []
    assert await store.rows(view.schedule) == []


async def test_what_this_worker_cannot_read_stays_and_others_go_on(fleet: AsyncFleet) -> None:
    await fleet.schedules.add("broken", LINES, AGENT, cron="@daily")
    await fleet.schedules.add("good", LINES, AGENT, cron="@hourly")
    store, scheduling = await opened(fleet)
    await make_due(store, "good", 2)
    held = await store_of(fleet)
    key = held.keys.of(SCHEDULES)
    await held.connection.execute("HSET", key, "broken", '{"from": "a newer version"}')
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
    held = await store_of(fleet)
    for name in ("sf:agents", USED):
        await held.connection.execute("DEL", held.keys.of(name))
    await scheduling.look("s")
    view = await store.get("s")
    assert (view.state.submitted, view.state.error) == (1, None)


async def test_a_removed_schedule_is_not_brought_back(fleet: AsyncFleet) -> None:
    await fleet.schedules.add("s", LINES, AGENT, cron="@hourly")
    store, _ = await opened(fleet)
    view, now = await store.get("s"), await store.now()
    await fleet.schedules.remove("s")
    await store.change(view.schedule, now)
    assert not await store.note(view.schedule, view.state, now)
    assert await fleet.schedules.all() == []
    assert (await store.due())[0] == []


async def test_a_schedule_that_is_added_again_has_nothing_of_the_one_before_it(
    fleet: AsyncFleet,
) -> None:
    """The owner of the one before was about to note a tick, and a client to pause it."""
    await fleet.schedules.add("s", LINES, AGENT, cron="@hourly")
    owner, _ = await opened(fleet)
    before, now = await owner.get("s"), await owner.now()
    assert await owner.take("s")
    await fleet.schedules.remove("s")
    added = await fleet.schedules.add("s", LINES[:2], AGENT, cron="@daily")
    ticked = before.state.model_copy(update={"submitted": 7, "last_tick": now})
    assert not await owner.note(before.schedule, ticked, now)
    await owner.look_at("s", now)
    await owner.change(before.schedule.model_copy(update={"paused": True}), now)
    assert not await owner.hold("s")
    other, scheduling = await opened(fleet)
    assert await other.get("s") == added
    assert len(await other.rows(added.schedule)) == 2
    inner = await store_of(fleet)
    rows = inner.keys.of("sf:{schedules}:rows:*")
    (kept,) = await inner.connection.execute("KEYS", rows)
    assert await inner.connection.execute("TTL", kept) == -1
    await make_due(other, "s", 25)
    await scheduling.look("s")
    assert (await other.get("s")).state.submitted == 1


async def test_what_is_left_of_a_schedule_goes_and_one_that_is_there_stays(
    fleet: AsyncFleet,
) -> None:
    await fleet.schedules.add("s", LINES, AGENT, cron="@hourly")
    store, scheduling = await opened(fleet)
    inner = await store_of(fleet)
    execute, key = inner.connection.execute, inner.keys.of(SCHEDULES)
    await store.forget("s")
    assert await store.is_there("s")
    await execute("HDEL", key, "s")  # as a client does that dies while it removes it
    await scheduling.look("s")
    assert await store.due() == ([], None)


async def test_ticks_that_are_left_out_are_counted_once(fleet: AsyncFleet) -> None:
    await fleet.schedules.add("s", LINES, AGENT, cron="@hourly")
    store, scheduling = await opened(fleet)
    await make_due(store, "s", 5)
    held = await store_of(fleet)
    view = await store.get("s")
    rows = held.keys.of(f"sf:{{schedules}}:rows:{view.schedule.rows_key}")
    await held.connection.execute("LPOP", rows)
    for _ in range(3):
        await scheduling.look("s")
    state = (await store.get("s")).state
    assert state.error is not None
    assert "2 of its 3 lines" in state.error
    assert (state.skipped, state.tries, state.submitted) == (4, 3, 0)


@pytest.mark.parametrize("field", ["only_new", "after"])
async def test_what_is_of_one_batch_is_refused(fleet: AsyncFleet, field: str) -> None:
    given = {"only_new": True, "after": "another run"}[field]
    options: dict[str, Any] = {field: given}
    with pytest.raises(ConfigurationError, match=field):
        await fleet.schedules.add("s", LINES, AGENT, cron="@daily", **options)


async def test_a_word_for_paused_is_refused(fleet: AsyncFleet) -> None:
    """A text as 'no' would otherwise be taken for what it does not say."""
    options: dict[str, Any] = {"paused": "no"}
    with pytest.raises(ConfigurationError, match="paused is 'no'; write True or False"):
        await fleet.schedules.add("s", LINES, AGENT, cron="@daily", **options)
    assert await fleet.schedules.all() == []


@pytest.mark.parametrize("name", [5, "", "a b", "-s", "s" * 65])
async def test_a_name_that_is_none_is_refused(fleet: AsyncFleet, name: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"name is .*; write 1 to 64"):
        await fleet.schedules.add(name, LINES, AGENT, cron="@daily")


async def test_an_owner_whose_turn_has_ended_can_do_no_harm(fleet: AsyncFleet) -> None:
    """It neither ends the turn of the next owner nor writes over what that one has noted."""
    await fleet.schedules.add("s", LINES, AGENT, cron="@hourly")
    slow, _ = await opened(fleet)
    quick, _ = await opened(fleet)
    view, now = await slow.get("s"), await slow.now()
    store = await store_of(fleet)
    turn = store.keys.of(f"{SCHEDULE_TURNS}s")
    assert await slow.take("s")
    assert not await quick.take("s")
    assert await slow.hold("s")
    await store.connection.execute("DEL", turn)  # as it ends by itself
    assert await quick.take("s")
    assert await quick.note(view.schedule, view.state.model_copy(update={"submitted": 2}), now)
    assert not await slow.note(view.schedule, view.state.model_copy(update={"submitted": 1}), now)
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
    store = await store_of(fleet)
    assert await dead.take("s")
    turn = store.keys.of(f"{SCHEDULE_TURNS}s")
    # Its end is a time of the clock before.
    await store.connection.execute("PEXPIRE", turn, TURN_MS + 3_600_000)
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


async def test_each_batch_has_the_schedules_limit_and_priority_and_its_ticks_time(
    fleet: AsyncFleet,
) -> None:
    lines = [{"id": "a", "input": "What is new on {tick_date}?"}]
    options: dict[str, Any] = {"limit": {"in_flight": 2}, "priority": "low", "missed": "all"}
    await fleet.schedules.add("s", lines, AGENT, cron="@daily", tz="Asia/Tokyo", **options)
    store, scheduling = await opened(fleet)
    await make_due(store, "s", 48)
    await scheduling.look("s")
    batches = await fleet.batches.newest(5)
    assert len(batches) == 2
    limits = await fleet.limits.all()
    held = await store_of(fleet)
    for one in batches:
        assert limits[f"batch:{one.batch_id}"].in_flight == 2
        run_id = run_id_of(one.batch_id, 0)
        key = held.keys.run(run_id)
        priority = await held.connection.execute("HGET", key, "priority")
        asked = (await fleet.runs.show(run_id)).state.messages[-1].text
        day = datetime.strptime(one.name, "s %Y%m%dT%H%M%S%z").astimezone(ZoneInfo("Asia/Tokyo"))
        assert (day.hour, priority) == (0, "2")
        assert f"What is new on {day:%Y-%m-%d}?" == asked


async def test_skipped_ticks_are_counted_once(fleet: AsyncFleet) -> None:
    cron = f"{((await _now(fleet)).minute + 30) % 60} * * * *"
    await fleet.schedules.add("s", LINES, AGENT, cron=cron, missed="skip")
    store, scheduling = await opened(fleet)
    await make_due(store, "s", 5)
    for _ in range(2):
        await scheduling.look("s")
    assert (await store.get("s")).state.skipped == 5


async def test_doctor_names_schedules_that_are_behind_or_cannot_be_submitted(
    fleet: AsyncFleet,
) -> None:
    for name in ("fine", "late", "broken", "ahead"):
        await fleet.schedules.add(name, LINES, AGENT, cron="@daily")
    await fleet.schedules.add("rests", LINES, AGENT, cron="@daily", paused=True)
    store, _ = await opened(fleet)
    now = await store.now()
    for name, changes, look in (
        ("late", {}, now - timedelta(minutes=5)),
        ("broken", {"error": "no lines", "tries": 3}, now + timedelta(minutes=5)),
        ("ahead", {"last_tick": now + timedelta(days=9)}, now + timedelta(days=10)),
    ):
        view = await store.get(name)
        await store.go_on(view.schedule, view.state.model_copy(update=changes), look)
    opened_store = await store_of(fleet)
    read = await read_fleet(opened_store)
    found = {
        one.check: one.found for one in fleet_checks(read, "agents") if "schedule" in one.check
    }
    assert set(found) == {"schedule ahead", "schedule broken", "schedule late"}
    assert "no worker is alive to submit" in found["schedule late"]
    assert "tried 3 times: no lines" in found["schedule broken"]
    assert "clock was set back" in found["schedule ahead"]
    assert (await fleet_figures(opened_store)).late_schedules == 3
    await fleet.schedules.pause("ahead")
    await fleet.schedules.resume("ahead")  # as the fix says
    assert (await store.get("ahead")).trouble(now) == ""


async def _now(fleet: AsyncFleet) -> datetime:
    return await (await opened(fleet))[0].now()


async def died_amid_a_tick(
    fleet: AsyncFleet, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> str:
    """Add a schedule whose owner dies when its first tick's batch has one run; return its id."""
    await fleet.schedules.add("s", LINES, AGENT, cron="0 * * * *", **options)
    store, worker = await opened(fleet)
    await make_due(store, "s", 1)
    real = RunSubmission.create_all

    async def dies(self: RunSubmission, runs: Sequence[NewRun]) -> list[bool]:
        await real(self, runs[:1])
        raise asyncio.CancelledError

    with monkeypatch.context() as patch:
        patch.setattr(RunSubmission, "create_all", dies)
        patch.setattr(Schedules, "release", nothing)
        with pytest.raises(asyncio.CancelledError):
            await worker.look("s")
    connection = (await store_of(fleet)).connection
    await connection.execute("DEL", f"{(await turn_key(fleet))}s")
    (found,) = await fleet.batches.newest(5)
    assert (await fleet.batches.get(found.batch_id)).id == found.batch_id
    assert found.submitted < len(LINES)
    return found.batch_id


async def nothing(*_: object) -> None:
    """Do nothing, as the dead do."""


async def turn_key(fleet: AsyncFleet) -> str:
    return (await store_of(fleet)).keys.of(SCHEDULE_TURNS)


@pytest.mark.parametrize("missed", ["newest", "all", "skip"])
async def test_a_tick_that_was_begun_is_completed_whatever_is_left_out_since(
    missed: Any, fleet: AsyncFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner died, and the next worker comes two ticks later."""
    if missed == "skip":
        monkeypatch.setattr("stepfleet.orchestrator.batches.scheduling.IN_TIME", timedelta(hours=2))
    batch_id = await died_amid_a_tick(fleet, monkeypatch, missed=missed)
    store, worker = await opened(fleet)
    later = await store.now() + timedelta(hours=2)
    with monkeypatch.context() as patch:
        patch.setattr(Schedules, "now", lambda _: value(later))
        await worker.look("s")
    batch = await fleet.batches.get(batch_id)
    assert (await batch.progress()).submitted == len(LINES)
    state = (await store.get("s")).state
    assert (state.begun, state.error) == (None, None)
    assert state.last_tick is not None
    assert later - state.last_tick < timedelta(hours=1)


async def value(given: datetime) -> datetime:
    return given


async def test_a_tick_that_was_begun_is_completed_also_where_its_schedule_was_paused(
    fleet: AsyncFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch_id = await died_amid_a_tick(fleet, monkeypatch)
    await fleet.schedules.pause("s")
    store, worker = await opened(fleet)
    assert await store.due() == (["s"], None)
    await worker.look("s")
    batch = await fleet.batches.get(batch_id)
    assert (await batch.progress()).submitted == len(LINES)
    ready, _ = await store.due()
    assert ready == []
    await fleet.schedules.resume("s")
    assert (await fleet.schedules.get("s")).state.begun is None


async def test_a_look_from_before_a_resume_does_not_put_the_schedule_off(
    fleet: AsyncFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.schedules.add("s", LINES, AGENT, cron="@every 1m", paused=True)
    store, worker = await opened(fleet)
    schedules = worker._schedules
    real = schedules.now

    async def resumed_meanwhile() -> datetime:
        monkeypatch.setattr(schedules, "now", real)
        await fleet.schedules.resume("s")
        return await real()

    monkeypatch.setattr(schedules, "now", resumed_meanwhile)
    await worker.look("s")
    view = await fleet.schedules.get("s")
    assert not view.schedule.paused
    assert view.next_tick is not None
    assert view.next_tick - await store.now() < timedelta(minutes=2)


async def test_a_tick_of_which_nothing_could_be_submitted_gives_way_to_a_newer_one(
    fleet: AsyncFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its batch was never there, so that nothing of it is to be completed."""
    await fleet.schedules.add("s", LINES, AGENT, cron="0 * * * *")
    store, worker = await opened(fleet)
    await make_due(store, "s", 1)

    async def unreadable(*_: object) -> str:
        return "no agent"

    with monkeypatch.context() as patch:
        patch.setattr(Schedules, "agent", unreadable)
        await worker.look("s")
    state = (await store.get("s")).state
    assert (state.begun, state.tries) == (None, 1)
    later = await store.now() + timedelta(hours=1)
    with monkeypatch.context() as patch:
        patch.setattr(Schedules, "now", lambda _: value(later))
        await worker.look("s")
    assert len(await fleet.batches.newest(5)) == 1
    state = (await store.get("s")).state
    assert (state.submitted, state.skipped, state.error) == (1, 1, None)
