"""What schedules say of themselves: their last ticks, their batches, and that they are late."""

from collections.abc import Sequence
from datetime import timedelta

from rich.console import Console

from stepfleet.orchestrator import Agent, AsyncFleet
from stepfleet.orchestrator.batches.scheduling import Scheduling
from stepfleet.orchestrator.cli.schedules import read, read_all, schedule_picture, table
from stepfleet.orchestrator.client.fleet import store_of
from stepfleet.orchestrator.store.fleet.checks import fleet_checks, read_fleet

AGENT = Agent("plain", model="openai:none")
LINES = [{"id": "a", "input": "x"}]


async def tick(fleet: AsyncFleet, name: str) -> None:
    """Let a tick of an hourly schedule be due, and submit it."""
    await make_late(fleet, name)
    await Scheduling(await store_of(fleet)).look(name)


async def make_late(fleet: AsyncFleet, name: str, seconds: float = 0) -> None:
    """Let a schedule have been added two hours ago, and be due since so many seconds."""
    store = await store_of(fleet)
    schedules = store.schedules
    view, now = await schedules.get(name), await schedules.now()
    earlier = view.schedule.model_copy(update={"created": now - timedelta(hours=2)})
    await schedules.change(earlier, now - timedelta(seconds=seconds))


async def rows(fleet: AsyncFleet, name: str) -> dict[str, str]:
    """Return the facts that `schedule show` prints."""
    console = Console(width=200)
    with console.capture() as captured:
        console.print(schedule_picture(await read(name, fleet)))
    pairs = (line.split("  ", 1) for line in captured.get().splitlines())
    return {label.strip(): value.strip() for label, value in pairs}


async def test_a_resume_is_no_tick_and_the_last_one_stays(fleet: AsyncFleet) -> None:
    await fleet.schedules.add("s", LINES, AGENT, cron="0 * * * *", paused=True)
    await fleet.schedules.resume("s")
    assert "last" not in await rows(fleet, "s")
    await fleet.schedules.remove("s")
    await fleet.schedules.add("s", LINES, AGENT, cron="0 * * * *")
    await tick(fleet, "s")
    state = (await fleet.schedules.get("s")).state
    assert state.submitted_tick is not None
    assert state.submitted_tick == state.last_tick
    before = await rows(fleet, "s")
    assert before["last"] == f"{state.submitted_tick:%Y-%m-%d %H:%M:%S} UTC"
    assert before["last batch"] == state.batch_id
    await fleet.schedules.pause("s")
    await fleet.schedules.resume("s")
    assert (await rows(fleet, "s"))["last"] == before["last"]


async def test_the_newest_batch_beside_the_ticks_is_shown_and_forgotten_with_its_schedule(
    fleet: AsyncFleet,
) -> None:
    add = fleet.schedules.add
    await add("s", LINES, AGENT, cron="0 * * * *")
    assert "last run-now" not in await rows(fleet, "s")
    await fleet.schedules.run_now("s")
    batch = await fleet.schedules.run_now("s")
    await tick(fleet, "s")
    (listed,) = await fleet.schedules.all()
    assert listed.run_now == batch.id
    shown = await rows(fleet, "s")
    assert shown["last run-now"] == batch.id != shown["last batch"]
    await fleet.schedules.remove("s")
    await add("s", LINES, AGENT, cron="0 * * * *")
    assert (await fleet.schedules.get("s")).run_now is None


async def test_a_schedule_that_is_due_says_that_no_worker_is_alive(fleet: AsyncFleet) -> None:
    """At once: nobody else will submit it. `show`, `list` and doctor, with the fix."""
    await fleet.schedules.add("s", LINES, AGENT, cron="@yearly")
    assert await doctor(fleet) == [("schedules", "1 on time or paused", "")]
    assert "trouble" not in await rows(fleet, "s")
    await make_late(fleet, "s", seconds=5)
    told = (await rows(fleet, "s"))["trouble"]
    assert told.startswith("late: no worker is alive to submit what was due at 20")
    console = Console(width=200)
    with console.capture() as captured:
        console.print(table(await read_all(fleet)))
    assert "no worker" in captured.get()
    assert await doctor(fleet) == [
        (
            "schedule s",
            told,
            "start one: stepfleet worker --agents MODULE (ticks it makes up: newest)",
        )
    ]
    await fleet.schedules.pause("s")
    assert "trouble" not in await rows(fleet, "s")


async def doctor(fleet: AsyncFleet) -> Sequence[tuple[str, str, str]]:
    """Return what doctor says of schedules."""
    read = await read_fleet(await store_of(fleet))
    found = [one for one in fleet_checks(read, "agents") if "schedule" in one.check]
    return [(one.check, one.found, one.fix) for one in found]
