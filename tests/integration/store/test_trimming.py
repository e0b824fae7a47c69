"""A log that is trimmed: part by part, and who committed a step is known for longer."""

from typing import Any

from support.runs.stored_runs import Bench

from stepfleet.orchestrator.store.lua import run_script

STEPS = 3000
LOST = '{"kind":"late","step":1,"seconds":1.0,"ambiguous":true}'


BENCH: dict[str, Any] = {"lease": 600.0, "grace": 60}


async def commit(desk: Bench, run_id: str, step: int, token: str, since: int) -> list[Any]:
    """Claim the step if it is open, and commit it; the log is wanted from `since` on."""
    told = {"verdict": "continue", "slim": "{}", "outcome": "{}", "log": "{}"}
    told |= {"dropped": LOST, "since": f"{since} input:0", "trim": "1"}
    numbers = {"delay": 0, "grace": 60_000, "event_count": 0, "tokens": 0, "cost": 0, "calls": 0}
    fields = [part for pair in {**told, **numbers, "events": "[]"}.items() for part in pair]
    keys = desk.opened.keys.script_keys(run_id, None)
    reply: list[Any] = await run_script(
        desk.opened.connection, "commit", keys, run_id, step, token, *fields
    )
    return reply


async def hold(desk: Bench, run_id: str, step: int, token: str) -> None:
    """Have a worker hold the step, as if it had claimed it."""
    key = desk.opened.keys.run(run_id)
    fields = ("step", step, "token", token, "status", "in_progress")
    await desk.opened.connection.execute("HSET", key, *fields)


async def steps_of(desk: Bench, run_id: str) -> list[int]:
    names = await desk.opened.connection.execute("HKEYS", f"{desk.opened.keys.run(run_id)}:log")
    return sorted(int(name) for name in names if name.isdigit())


async def test_a_long_log_goes_part_by_part_and_what_is_needed_stays(desk: Bench) -> None:
    run_id = await desk.create()
    log = f"{desk.opened.keys.run(run_id)}:log"
    written = [part for n in range(STEPS) for part in (str(n), "{}", f"by:o{n}", n)]
    for at in range(0, len(written), 4000):
        await desk.opened.connection.execute("HSET", log, *written[at : at + 4000])
    step, before = STEPS, 2 * STEPS
    while before >= 200 or (await steps_of(desk, run_id))[0] < step - 2:
        await hold(desk, run_id, step, f"t{step}")
        assert (await commit(desk, run_id, step, f"t{step}", step))[0] == "committed"
        left = await desk.opened.connection.execute("HLEN", log)
        assert before - left <= 1000
        assert step in await steps_of(desk, run_id)
        assert await desk.opened.connection.execute("HEXISTS", log, "input:0")
        before, step = left, step + 1
        assert step < STEPS + 40


async def test_a_late_repetition_of_a_commit_is_known_behind_the_trim(desk: Bench) -> None:
    """Its reply was lost, others have gone on and its step is trimmed: nothing of it is lost."""
    run_id = await desk.create()
    for step in range(10):
        await hold(desk, run_id, step, f"t{step}")
        assert (await commit(desk, run_id, step, f"t{step}", step))[0] == "committed"
    assert await steps_of(desk, run_id) == [9]
    assert (await commit(desk, run_id, 2, "t2", 2))[0] == "mine"
    ledger = f"{desk.opened.keys.run(run_id)}:lost"
    assert await desk.opened.connection.execute("HLEN", ledger) == 0
