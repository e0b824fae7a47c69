"""Steps that have ended two workers: tried in a process of their own, or left for a while."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from deadlines import until
from stored_runs import Bench, bench

from stepfleet.orchestrator.loading_agents import load_agents
from stepfleet.orchestrator.protocol.claim import Claim, StepHint
from stepfleet.worker.alone import Trials
from stepfleet.worker.leases import Leases
from stepfleet.worker.testing import ModelServer, Reply

AGENTS = Path(__file__).parent.parent / "acceptance" / "agents" / "agents.py"
PLAIN = load_agents(str(AGENTS))["plain"]
LIMIT = 3
LONG = 60.0
ENDS_AT_ONCE = (sys.executable, "-c", "raise SystemExit('cannot start')")
NEVER_BEGINS = (sys.executable, "-c", "import time; time.sleep(600)")


@pytest.fixture
async def desk(redis_url: str) -> AsyncIterator[Bench]:
    async with bench(redis_url, PLAIN, lease=0.5, grace=0.2) as opened:
        yield opened


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, redis_url: str) -> pytest.MonkeyPatch:
    monkeypatch.setenv("STEPFLEET_REDIS_URL", redis_url)
    monkeypatch.setenv("STEPFLEET_AGENTS", str(AGENTS))
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    return monkeypatch


async def suspect(desk: Bench, crashes: int = LIMIT - 1) -> Claim:
    """Return the claim of a step that has ended that many workers; it lasts for a minute."""
    run_id = await desk.create()
    terms = desk.steps.terms
    desk.steps.terms = replace(terms, lease=0.5)

    async def taken() -> Claim | None:
        claim = await desk.steps.claim(StepHint(run_id, 0), desk.token())
        return claim if isinstance(claim, Claim) else None

    for _ in range(crashes):
        assert await until(taken, within=10)
    desk.steps.terms = replace(terms, lease=LONG)
    claim = await until(taken, within=10)
    assert claim is not None
    assert claim.crashes == crashes
    return claim


@pytest.mark.parametrize("crashes", [0, 1])
async def test_a_step_with_more_chances_is_done_where_it_was_taken(
    desk: Bench, crashes: int
) -> None:
    claim = await suspect(desk, crashes)
    with Leases(time.monotonic).hold(claim):
        assert not await Trials(LIMIT, 1.0).tried(claim, desk.steps)


async def test_where_a_single_repetition_is_allowed_nothing_is_tried(desk: Bench) -> None:
    claim = await suspect(desk, 1)
    with Leases(time.monotonic).hold(claim):
        assert not await Trials(2, 1.0).tried(claim, desk.steps)


async def test_a_last_chance_is_taken_in_a_process_of_its_own(
    desk: Bench, environment: pytest.MonkeyPatch
) -> None:
    """DIST-08: it goes on under the same claim, and its commit clears the run of suspicion."""
    claim = await suspect(desk)
    with ModelServer(lambda _: Reply("alone")) as model:
        environment.setenv("OPENAI_BASE_URL", model.url)
        with Leases(time.monotonic).hold(claim):
            assert await Trials(LIMIT, 1.0).tried(claim, desk.steps)
    run = await desk.stored(claim.run_id)
    assert run.result().output == "alone"
    assert [one.kind for one in run.result().lost_attempts] == ["crash"] * (LIMIT - 1)


async def test_where_no_process_can_be_started_the_step_is_done_here(desk: Bench) -> None:
    claim = await suspect(desk)
    with Leases(time.monotonic).hold(claim):
        assert not await Trials(LIMIT, 1.0, ENDS_AT_ONCE).tried(claim, desk.steps)
    assert (await desk.header(claim.run_id))["token"] == claim.token


async def test_steps_without_a_place_wait_in_nobodys_hands(desk: Bench) -> None:
    """DIST-08: nobody is blamed for what ends the worker meanwhile."""
    trials = Trials(LIMIT, 30.0, NEVER_BEGINS)
    leases = Leases(time.monotonic)
    claims = [await suspect(desk) for _ in range(3)]
    tasks = [asyncio.create_task(attempt(trials, leases, desk, claim)) for claim in claims]

    async def a_third_is_free() -> bool:
        free = [not (await desk.header(claim.run_id))["token"] for claim in claims]
        return free.count(True) == 1

    await until(a_third_is_free, within=30)
    [waiting] = [one for one in claims if not (await desk.header(one.run_id))["token"]]
    due = await desk.due(waiting.run_id)
    now = (await desk.runs.now()).timestamp() * 1000
    assert due is not None
    assert due > now + 10_000
    leases.hand_back()
    assert await asyncio.gather(*tasks) == [True] * 3


async def test_a_trial_that_was_not_begun_is_handed_back(desk: Bench) -> None:
    """DIST-08: a worker that stops counts no crash."""
    claim = await suspect(desk)
    leases = Leases(time.monotonic)
    trials = Trials(LIMIT, 1.0, NEVER_BEGINS)
    task = asyncio.create_task(attempt(trials, leases, desk, claim))
    await until(held(leases, claim), within=10)
    leases.hand_back()
    assert await task
    header = await desk.header(claim.run_id)
    assert not header["token"]
    assert int(header["crashes"]) == LIMIT - 1


async def test_a_cancel_that_arrives_before_a_trial_ends_the_run(desk: Bench) -> None:
    """DIST-09"""
    claim = await suspect(desk)
    await desk.control.cancel(await desk.stored(claim.run_id), "enough")
    leases = Leases(time.monotonic)
    task = asyncio.create_task(attempt(Trials(LIMIT, 1.0, NEVER_BEGINS), leases, desk, claim))
    await until(held(leases, claim), within=10)
    leases.hand_back()
    assert await task
    again = await desk.claim(claim.run_id)
    assert again.state.stop_requested


async def attempt(trials: Trials, leases: Leases, desk: Bench, claim: Claim) -> bool:
    with leases.hold(claim):
        return await trials.tried(claim, desk.steps)


def held(leases: Leases, claim: Claim) -> Callable[[], Awaitable[bool]]:
    async def is_held() -> bool:
        return leases.find(claim.run_id) is not None

    return is_held
