"""Work that has ended two workers: tried in a process of its own, or left for a while."""

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import trial_starter
from deadlines import until
from scripted_steps import Hands
from stored_runs import Bench, bench
from trial_starter import LIMIT, call_taken, claimed, marks, trials

from stepfleet.orchestrator.fleet import AsyncFleet
from stepfleet.orchestrator.loading_agents import load_agents
from stepfleet.orchestrator.protocol.attempt import Prevented, Span
from stepfleet.orchestrator.protocol.claim import Claim, StepHint
from stepfleet.orchestrator.protocol.guards import poisoned
from stepfleet.orchestrator.protocol.waiting import NotTakenNow, TakenCall, ToolHint
from stepfleet.worker.call_leases import CallLeases
from stepfleet.worker.leases import Leases
from stepfleet.worker.testing import ModelServer, Reply, RequestRecord, ToolCallReply
from stepfleet.worker.trials import SPARED, Trials

AGENTS = Path(__file__).parent.parent / "acceptance" / "agents" / "agents.py"
HEAVY_AGENTS = AGENTS.with_name("heavy_agents.py")
PLAIN = load_agents(str(AGENTS))["plain"]
HEAVY = load_agents(str(HEAVY_AGENTS))["heavy"]
LOUD = """
from stepfleet.orchestrator import Agent

print("whatever an agent's module prints is not what a trial says")
loud = Agent("loud", model="openai:none")
"""
STUCK = """
import asyncio, sys, time
from stepfleet.worker.alone import end_if_stuck

async def main():
    watch = asyncio.create_task(end_if_stuck(4.0))
    await asyncio.sleep(4.5)
    print("was not stuck", flush=True)
    time.sleep(60)

asyncio.run(main())
"""
SHORT, LONG = 0.5, 60.0
ENDS_AT_ONCE = (sys.executable, "-c", "raise SystemExit('cannot start')")
BEGINS_AND_DIES = (sys.executable, "-c", "print('began', flush=True); raise SystemExit(9)")
NEVER_BEGINS = (sys.executable, "-c", "import time; time.sleep(600)")
BEGINS_WHEN_TOLD = """
import pathlib, sys, time
go = pathlib.Path(sys.argv[1])
go.with_name("starting").touch()
deadline = time.monotonic() + 120
while not go.exists() and time.monotonic() < deadline:
    time.sleep(0.01)
from stepfleet.worker import alone
alone.main(sys.argv[2:])
"""


@pytest.fixture
async def desk(redis_url: str) -> AsyncIterator[Bench]:
    async with bench(redis_url, PLAIN, lease=SHORT, grace=0.2) as opened:
        yield opened


@pytest.fixture
async def heavy_desk(redis_url: str) -> AsyncIterator[Bench]:
    async with bench(redis_url, HEAVY, lease=SHORT, grace=0.2) as opened:
        yield opened


@pytest.fixture
def environment(
    monkeypatch: pytest.MonkeyPatch, redis_url: str, tmp_path: Path
) -> pytest.MonkeyPatch:
    monkeypatch.setenv("STEPFLEET_REDIS_URL", redis_url)
    monkeypatch.setenv("STEPFLEET_LEASE", str(SHORT))
    loud = tmp_path / "loud.py"
    loud.write_text(LOUD)
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    monkeypatch.setenv("STEPFLEET_AGENTS", f"{loud},{AGENTS},{HEAVY_AGENTS}")
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setenv("EFFECTS", str(tmp_path / "effects"))
    return monkeypatch


async def crashed(desk: Bench, crashes: int = LIMIT - 1) -> str:
    """Return a run whose first step has ended that many workers."""
    run_id = await desk.create()
    desk.steps.terms = replace(desk.steps.terms, lease=SHORT)
    for _ in range(crashes):
        await claimed(desk, run_id)
    return run_id


async def suspect(desk: Bench, crashes: int = LIMIT - 1) -> Claim:
    """Return the claim of a step that has ended that many workers; it lasts for a minute."""
    run_id = await crashed(desk, crashes)
    desk.steps.terms = replace(desk.steps.terms, lease=LONG)
    claim = await claimed(desk, run_id)
    assert claim.crashes == crashes
    return claim


async def crashed_call(desk: Bench, crashes: int = LIMIT - 1) -> str:
    """Return a run that waits for a tool call which has ended that many workers."""
    run_id = await desk.create()
    async with working(desk) as hands:
        await hands.step(run_id, 0)
    for _ in range(crashes):
        await call_taken(desk, run_id, 0)
    return run_id


@asynccontextmanager
async def working(desk: Bench) -> AsyncIterator[Hands]:
    """Yield hands that do steps with real model calls."""
    hands = Hands(desk, HEAVY)
    try:
        yield hands
    finally:
        await hands.models.aclose()


async def suspect_call(desk: Bench, crashes: int = LIMIT - 1) -> TakenCall:
    """Return such a call, taken for a minute."""
    run_id = await crashed_call(desk, crashes)
    desk.steps.calls.lease = LONG
    taken = await call_taken(desk, run_id, 0)
    assert taken.crashes == crashes
    return taken


def measures(request: RequestRecord) -> Reply:
    """Ask for a tool of a queue of its own, then answer."""
    if request.turn > 1:
        return Reply("measured")
    return Reply(None, tool_calls=(ToolCallReply("measure", {"what": "it"}),))


@pytest.mark.parametrize("crashes", [0, 1])
async def test_a_step_with_more_chances_is_done_where_it_was_taken(
    desk: Bench, crashes: int
) -> None:
    claim = await suspect(desk, crashes)
    with Leases(time.monotonic).hold(claim) as lease:
        assert not await trials(desk).tried(lease, desk.steps)


async def test_where_a_single_repetition_is_allowed_nothing_is_tried(desk: Bench) -> None:
    claim = await suspect(desk, 1)
    with Leases(time.monotonic).hold(claim) as lease:
        assert not await trials(desk, limit=2).tried(lease, desk.steps)


async def test_a_last_chance_is_taken_in_a_process_of_its_own(
    desk: Bench, environment: pytest.MonkeyPatch
) -> None:
    """DIST-08: it goes on under the same claim, and its commit clears the run of suspicion."""
    claim = await suspect(desk)
    with ModelServer(lambda _: Reply("alone")) as model:
        environment.setenv("OPENAI_BASE_URL", model.url)
        with Leases(time.monotonic).hold(claim) as lease:
            assert await trials(desk).tried(lease, desk.steps)
    run = await desk.stored(claim.run_id)
    assert run.result().output == "alone"
    assert [one.kind for one in run.result().lost_attempts] == ["crash"] * (LIMIT - 1)


async def test_a_heavy_call_takes_its_last_chance_in_a_process_of_its_own(
    heavy_desk: Bench, environment: pytest.MonkeyPatch
) -> None:
    """DIST-08: beside others, whoever ends the worker would be counted against it too."""
    with ModelServer(measures) as model:
        environment.setenv("OPENAI_BASE_URL", model.url)
        taken = await suspect_call(heavy_desk)
        calls = heavy_desk.steps.calls
        with CallLeases(time.monotonic).hold(taken) as lease:
            assert await trials(heavy_desk).tried_call(lease, calls)
        run_id = taken.hint.run_id
        async with working(heavy_desk) as hands:
            await hands.finish(run_id)
    result = (await heavy_desk.stored(run_id)).result()
    [record] = result.steps[0].tool_calls
    assert record.result == "measured it"
    assert [one.kind for one in result.lost_attempts] == ["crash"] * (LIMIT - 1)


async def test_where_no_process_can_be_started_the_step_is_done_here(desk: Bench) -> None:
    claim = await suspect(desk)
    with Leases(time.monotonic).hold(claim) as lease:
        assert not await trials(desk, *ENDS_AT_ONCE).tried(lease, desk.steps)
    assert (await desk.header(claim.run_id))["token"] == claim.token


async def test_a_step_that_is_nobodys_any_more_is_not_done_here(
    desk: Bench, redis_url: str
) -> None:
    """Its process was refused, for the run was taken or ended while it started."""
    claim = await suspect(desk)
    take = (
        "import redis, sys; redis.Redis.from_url(sys.argv[1]).hset(sys.argv[2], 'token', 'another')"
    )
    taken = (sys.executable, "-c", take, redis_url, desk.opened.keys.run(claim.run_id))
    with Leases(time.monotonic).hold(claim) as lease:
        assert await trials(desk, *taken).tried(lease, desk.steps)


async def test_where_the_machine_has_no_process_to_give_the_step_waits_for_one(desk: Bench) -> None:
    claim = await suspect(desk)
    with Leases(time.monotonic).hold(claim) as lease:
        assert await trials(desk, "./no-such-program").tried(lease, desk.steps)
    header = await desk.header(claim.run_id)
    assert header["token"] == ""
    assert header["crashes"] == str(LIMIT - 1)


async def test_a_process_whose_loop_stands_still_ends() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", STUCK, stdout=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(60):
        said, _ = await process.communicate()
    assert said == b"was not stuck\n"
    assert process.returncode == -signal.SIGKILL


async def test_what_dies_in_a_process_of_its_own_is_counted_at_once(desk: Bench) -> None:
    """DIST-08: the lease of a trial is long, and its end is known."""
    claim = await suspect(desk)
    with Leases(time.monotonic).hold(claim) as lease:
        assert await trials(desk, *BEGINS_AND_DIES).tried(lease, desk.steps)
    assert (await desk.claim(claim.run_id)).crashes == LIMIT


async def test_a_call_that_dies_in_a_process_of_its_own_is_counted_at_once(
    heavy_desk: Bench, environment: pytest.MonkeyPatch
) -> None:
    """DIST-08"""
    with ModelServer(measures) as model:
        environment.setenv("OPENAI_BASE_URL", model.url)
        taken = await suspect_call(heavy_desk)
    calls = heavy_desk.steps.calls
    with CallLeases(time.monotonic).hold(taken) as lease:
        assert await trials(heavy_desk, *BEGINS_AND_DIES).tried_call(lease, calls)
    again = await calls.take(taken.hint, "another")
    assert isinstance(again, TakenCall)
    assert again.crashes == LIMIT


async def test_who_dies_on_the_way_to_a_trial_is_not_counted_against_the_step(
    desk: Bench, environment: pytest.MonkeyPatch
) -> None:
    """DIST-08: what has not begun in a process of its own is tried again."""
    claim = await suspect(desk, LIMIT + 1)
    with ModelServer(lambda _: Reply("alone")) as model:
        environment.setenv("OPENAI_BASE_URL", model.url)
        with Leases(time.monotonic).hold(claim) as lease:
            assert await trials(desk).tried(lease, desk.steps)
    assert (await desk.stored(claim.run_id)).result().output == "alone"


async def test_who_dies_on_the_way_to_a_trial_is_not_counted_against_a_call(
    heavy_desk: Bench, environment: pytest.MonkeyPatch
) -> None:
    """DIST-08: nor a call that waits for a place, in the hands of many."""
    with ModelServer(measures) as model:
        environment.setenv("OPENAI_BASE_URL", model.url)
        taken = await suspect_call(heavy_desk, LIMIT)
        calls = heavy_desk.steps.calls
        with CallLeases(time.monotonic).hold(taken) as lease:
            assert await trials(heavy_desk).tried_call(lease, calls)
        async with working(heavy_desk) as hands:
            await hands.finish(taken.hint.run_id)
    [record] = (await heavy_desk.stored(taken.hint.run_id)).result().steps[0].tool_calls
    assert record.result == "measured it"


async def test_what_has_died_alone_has_no_further_chance(desk: Bench) -> None:
    """DIST-08: it is given up by whoever has it next; who did not own it says nothing."""
    claim = await suspect(desk)
    hint = StepHint(claim.run_id, claim.step)
    for died in (False, True):
        await marks(desk).begin(hint, claim.token if died else "of nobody")
        with Leases(time.monotonic).hold(claim) as lease:
            assert await trials(desk, *BEGINS_AND_DIES).tried(lease, desk.steps)
        claim = await desk.claim(claim.run_id)
        assert await marks(desk).has_died(hint) == died
    with Leases(time.monotonic).hold(claim) as lease:
        assert not await trials(desk, *NEVER_BEGINS).tried(lease, desk.steps)


async def test_a_run_that_is_retried_has_its_chances_again(desk: Bench, redis_url: str) -> None:
    """DIST-08: what its step did to a process before the retry is not held against it."""
    claim = await suspect(desk, LIMIT)
    hint = StepHint(claim.run_id, claim.step)
    await marks(desk).begin(hint, claim.token)
    outcome = poisoned(claim, LIMIT)
    assert outcome is not None
    await desk.commit(claim, Prevented(Span(claim.now, 0.0), outcome))
    journal = f"{desk.opened.keys.run(claim.run_id)}:journal"
    assert await desk.opened.connection.execute("HGET", journal, "t") == claim.token
    async with AsyncFleet(redis_url) as fleet:
        await fleet.retry(claim.run_id)
    assert await desk.opened.connection.execute("HGET", journal, "t") is None


async def test_a_call_that_has_died_alone_has_no_further_chance(
    heavy_desk: Bench, environment: pytest.MonkeyPatch
) -> None:
    """DIST-08"""
    with ModelServer(measures) as model:
        environment.setenv("OPENAI_BASE_URL", model.url)
        taken = await suspect_call(heavy_desk)
    calls = heavy_desk.steps.calls
    for died in (False, True):
        await marks(heavy_desk).begin(taken.hint, taken.token if died else "of nobody")
        with CallLeases(time.monotonic).hold(taken) as lease:
            assert await trials(heavy_desk, *BEGINS_AND_DIES).tried_call(lease, calls)
        taken = await call_taken(heavy_desk, taken.hint.run_id, 0)
        assert await marks(heavy_desk).has_died(taken.hint) == died
    with CallLeases(time.monotonic).hold(taken) as lease:
        assert not await trials(heavy_desk, *NEVER_BEGINS).tried_call(lease, calls)


async def test_a_step_that_went_on_to_wait_alone_has_further_chances(
    heavy_desk: Bench, environment: pytest.MonkeyPatch
) -> None:
    """DIST-08: its process let it wait for a tool, and so has not died of it."""
    with ModelServer(measures) as model:
        environment.setenv("OPENAI_BASE_URL", model.url)
        claim = await suspect(heavy_desk)
        hint = StepHint(claim.run_id, claim.step)
        with Leases(time.monotonic).hold(claim) as lease:
            assert await trials(heavy_desk).tried(lease, heavy_desk.steps)
        assert (await heavy_desk.header(claim.run_id))["waiting"]
        async with working(heavy_desk) as hands:
            await hands.call(claim.run_id, 0, 0)
        heavy_desk.steps.terms = replace(heavy_desk.steps.terms, lease=SHORT)
        for _ in range(2):  # the second one comes when the first one's worker has died
            claim = await claimed(heavy_desk, claim.run_id)
        assert claim.crashes == LIMIT
        assert not await marks(heavy_desk).has_died(hint)
        with Leases(time.monotonic).hold(claim) as lease:
            assert await trials(heavy_desk).tried(lease, heavy_desk.steps)
    assert (await heavy_desk.header(claim.run_id))["step"] == "1"


async def test_a_step_whose_trial_never_begins_is_given_up_in_the_end(desk: Bench) -> None:
    """DIST-08: however often a worker dies of starting it."""
    claim = await suspect(desk, LIMIT + SPARED)
    with Leases(time.monotonic).hold(claim) as lease:
        assert not await trials(desk, *NEVER_BEGINS).tried(lease, desk.steps)


async def test_steps_without_a_place_wait_in_nobodys_hands(desk: Bench) -> None:
    """DIST-08: nobody is blamed for what ends the worker meanwhile."""
    few = trials(desk, *NEVER_BEGINS, wait=600.0)
    leases = Leases(time.monotonic)
    claims = [await suspect(desk) for _ in range(3)]
    tasks = [asyncio.create_task(attempt(few, leases, desk, claim)) for claim in claims]

    async def a_third_is_free() -> bool:
        free = [not (await desk.header(claim.run_id))["token"] for claim in claims]
        return free.count(True) == 1

    await until(a_third_is_free, within=30)
    [waiting] = [one for one in claims if not (await desk.header(one.run_id))["token"]]
    due = await desk.due(waiting.run_id)
    now = (await desk.runs.now()).timestamp() * 1000
    assert due is not None
    assert due > now + 300_000
    leases.hand_back()
    assert await asyncio.gather(*tasks) == [True] * 3


async def test_a_trial_that_was_not_begun_is_handed_back(desk: Bench) -> None:
    """DIST-08: a worker that stops counts no crash."""
    claim = await suspect(desk)
    leases = Leases(time.monotonic)
    task = asyncio.create_task(attempt(trials(desk, *NEVER_BEGINS), leases, desk, claim))
    await until(held(leases, claim), within=60)
    leases.hand_back()
    assert await task
    header = await desk.header(claim.run_id)
    assert not header["token"]
    assert int(header["crashes"]) == LIMIT - 1


async def test_a_trial_of_a_call_that_was_not_begun_is_handed_back(
    heavy_desk: Bench, environment: pytest.MonkeyPatch
) -> None:
    """DIST-08: another worker may start it, and nobody counts this one's end."""
    with ModelServer(measures) as model:
        environment.setenv("OPENAI_BASE_URL", model.url)
        taken = await suspect_call(heavy_desk)
    calls, leases = heavy_desk.steps.calls, CallLeases(time.monotonic)

    async def tries() -> bool:
        with leases.hold(taken) as lease:
            return await trials(heavy_desk, *NEVER_BEGINS).tried_call(lease, calls)

    async def is_held() -> bool:
        return len(leases) == 1

    task = asyncio.create_task(tries())
    await until(is_held, within=60)
    leases.hand_back()
    assert await task
    again = await calls.take(taken.hint, "another")
    assert isinstance(again, TakenCall)
    assert (again.crashes, again.attempt) == (taken.crashes, taken.attempt)


async def test_a_cancel_that_arrives_before_a_trial_ends_the_run(desk: Bench) -> None:
    """DIST-09"""
    claim = await suspect(desk)
    await desk.control.cancel(await desk.stored(claim.run_id), "enough")
    leases = Leases(time.monotonic)
    task = asyncio.create_task(attempt(trials(desk, *NEVER_BEGINS), leases, desk, claim))
    await until(held(leases, claim), within=60)
    leases.hand_back()
    assert await task
    again = await desk.claim(claim.run_id)
    assert again.state.stop_requested


async def test_who_starts_a_steps_process_may_die_before_it_has_begun(
    desk: Bench, environment: pytest.MonkeyPatch, redis_url: str, tmp_path: Path
) -> None:
    """DIST-08: however short the lease is, the step is not to blame, and it is done."""
    run_id = await crashed(desk)
    with ModelServer(lambda _: Reply("alone")) as model:
        environment.setenv("OPENAI_BASE_URL", model.url)
        async with starter_died(redis_url, tmp_path, "plain", run_id, "-1"):
            assert (await over_the_lease(desk, run_id)) == "leased"

        async def has_ended() -> bool:
            return (await desk.stored(run_id)).state.status.is_terminal

        await until(has_ended, within=90)
    result = (await desk.stored(run_id)).result()
    assert result.output == "alone"
    assert [one.kind for one in result.lost_attempts] == ["crash"] * (LIMIT - 1)


async def test_who_starts_a_calls_process_may_die_before_it_has_begun(
    heavy_desk: Bench, environment: pytest.MonkeyPatch, redis_url: str, tmp_path: Path
) -> None:
    """DIST-08: the call is not to blame for it, and it is made."""
    with ModelServer(measures) as model:
        environment.setenv("OPENAI_BASE_URL", model.url)
        run_id = await crashed_call(heavy_desk)
        async with starter_died(redis_url, tmp_path, "heavy", run_id, "0"):
            assert (await over_the_lease(heavy_desk, run_id, 0)) == "leased"

        async def is_delivered() -> bool:
            return (await heavy_desk.header(run_id))["waiting"] == ""

        await until(is_delivered, within=90)
        async with working(heavy_desk) as hands:
            await hands.finish(run_id)
    [record] = (await heavy_desk.stored(run_id)).result().steps[0].tool_calls
    assert record.result == "measured it"


@asynccontextmanager
async def starter_died(
    url: str, folder: Path, agent: str, run_id: str, index: str
) -> AsyncIterator[None]:
    """Kill who starts a process, before it has begun; it begins when this is left."""
    go = folder / "go"
    command = (sys.executable, "-c", BEGINS_WHEN_TOLD, str(go))
    file = HEAVY_AGENTS if agent == "heavy" else AGENTS
    given = (url, str(file), agent, run_id, index, str(SHORT), *command)
    starter = await asyncio.create_subprocess_exec(sys.executable, trial_starter.__file__, *given)

    async def is_starting() -> bool:
        return go.with_name("starting").exists()

    try:
        await until(is_starting, within=60)
    finally:
        starter.kill()
        await starter.wait()
    yield
    go.touch()


async def over_the_lease(desk: Bench, run_id: str, index: int | None = None) -> str:
    """Wait for twice a lease; return why the step, or its call, cannot be taken then."""
    began = await desk.runs.now()

    async def is_over() -> bool:
        return (await desk.runs.now() - began).total_seconds() > 2 * SHORT

    await until(is_over, within=30)
    if index is None:
        return str((await desk.refused(run_id)).why)
    found = await desk.steps.calls.take(ToolHint(run_id, 0, index), desk.token())
    assert isinstance(found, NotTakenNow)
    return str(found.why)


async def attempt(trials: Trials, leases: Leases, desk: Bench, claim: Claim) -> bool:
    with leases.hold(claim) as lease:
        return await trials.tried(lease, desk.steps)


def held(leases: Leases, claim: Claim) -> Callable[[], Awaitable[bool]]:
    async def is_held() -> bool:
        return leases.find(claim.run_id) is not None

    return is_held
