"""Work that has lost its workers again and again: tried with its like in processes for suspects."""

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.deadlines import until
from support.runs.heavy_calls import call_lease_runs_out
from support.runs.opened_runs import lease_runs_out
from support.runs.scripted_steps import Hands
from support.runs.stored_runs import Bench, bench
from support.workers import trial_starter
from support.workers.trial_starter import LIMIT, call_taken, claimed, ports, trials

from stepfleet.orchestrator import AsyncFleet, LLMResponse, ToolCall
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.orchestrator.events.envelope import Events
from stepfleet.orchestrator.protocol.attempt import Interruption, Prevented, Span
from stepfleet.orchestrator.protocol.claim import Claim, How, Loss, Stance, Work
from stepfleet.orchestrator.protocol.guards import poisoned
from stepfleet.orchestrator.protocol.verdict import Move, Verdict
from stepfleet.orchestrator.protocol.waiting import TakenCall
from stepfleet.worker.leases.lease import Leases
from stepfleet.worker.runtime.isolation import Isolation
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Reply, ToolCallReply
from stepfleet.worker.testing.server import ModelServer

TESTS = Path(__file__).parents[2]
AGENTS = TESTS / "acceptance" / "agent_modules" / "agents.py"
HEAVY_AGENTS = AGENTS.with_name("heavy_agents.py")
PLAIN = load_agents(str(AGENTS))["plain"]
HEAVY = load_agents(str(HEAVY_AGENTS))["heavy"]
LOUD = """
from stepfleet.orchestrator import Agent

print("whatever an agent's module prints is not what a process for suspects says")
loud = Agent("loud", model="openai:none")
"""
STUCK = """
import asyncio, sys, time
from stepfleet.worker.runtime.isolated_process import end_if_stuck

async def main():
    watch = asyncio.create_task(end_if_stuck(4.0))
    await asyncio.sleep(4.5)
    print("was not stuck", flush=True)
    time.sleep(60)

asyncio.run(main())
"""

SHORT, LONG = 0.5, 60.0
ENDS_AT_ONCE = (sys.executable, "-c", "raise SystemExit('cannot start')")
BEGINS_AND_DIES = (
    sys.executable,
    "-c",
    """
import json, os, sys
print("ready", flush=True)
begun = 0
for line in sys.stdin:
    order = json.loads(line)
    print("began", order["token"], flush=True)
    begun += 1
    if begun == order["group"]:
        os._exit(9)
""",
)
DIES_WHEN_TOLD = """
import json, os, pathlib, sys, time
print("ready", flush=True)
order = json.loads(sys.stdin.readline())
print("began", order["token"], flush=True)
told = pathlib.Path(sys.argv[1])
told.touch()
while told.exists():
    time.sleep(0.01)
os._exit(9)
"""
NEVER_BEGINS = (sys.executable, "-c", "import time; print('ready', flush=True); time.sleep(600)")
COUNTED = """
import os, pathlib, sys
with pathlib.Path(sys.argv[1]).open("a") as file:
    file.write("started\\n")
os.execv(sys.executable, [sys.executable, "-m", "stepfleet.worker.runtime.isolated_process"])
"""
ASKS = LLMResponse(content="", tool_calls=(ToolCall(id="c", name="look", arguments={}),))


BENCH: dict[str, Any] = {"agent": PLAIN, "lease": SHORT, "grace": 0.2}


@pytest.fixture
async def heavy_desk(redis_url: str) -> AsyncIterator[Bench]:
    async with bench(redis_url, HEAVY, lease=SHORT, grace=0.2) as opened:
        yield opened


@pytest.fixture
def environment(
    monkeypatch: pytest.MonkeyPatch, redis_url: str, tmp_path: Path
) -> pytest.MonkeyPatch:
    monkeypatch.setenv("STEPFLEET_REDIS_URL", redis_url)
    monkeypatch.setenv("STEPFLEET_LEASE", str(LONG))
    loud = tmp_path / "loud.py"
    loud.write_text(LOUD)
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    monkeypatch.setenv("STEPFLEET_AGENTS", f"{loud},{AGENTS},{HEAVY_AGENTS}")
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setenv("EFFECTS", str(tmp_path / "effects"))
    return monkeypatch


async def taken_over(desk: Bench, run_id: str) -> Claim:
    """Take a run's first step from whoever holds it."""
    await lease_runs_out(desk, run_id)
    return await claimed(desk, run_id)


async def call_taken_over(desk: Bench, run_id: str, index: int) -> TakenCall:
    """Take a call of a run's first step from whoever holds it."""
    await call_lease_runs_out(desk, run_id, index)
    return await call_taken(desk, run_id, index)


async def crashed(desk: Bench, crashes: int = LIMIT) -> str:
    """Return a run whose first step has lost that many workers, all in their model calls."""
    run_id = await desk.create()
    desk.steps.lease = SHORT
    for _ in range(crashes):
        await taken_over(desk, run_id)
    return run_id


async def suspect(desk: Bench, crashes: int = LIMIT) -> Claim:
    """Return the claim of a step that has lost that many workers; it lasts for a minute."""
    run_id = await crashed(desk, crashes)
    return await lasting(desk, run_id, crashes)


async def lasting(desk: Bench, run_id: str, crashes: int) -> Claim:
    """Take a run's first step for a minute, when it has lost that many workers."""
    desk.steps.lease = LONG
    claim = await taken_over(desk, run_id)
    assert claim.crashes == crashes
    return claim


async def tool_suspect(desk: Bench) -> Claim:
    """Return the claim of a step that has lost two workers, the second while its tool ran."""
    run_id = await crashed(desk, 1)
    claim = await taken_over(desk, run_id)
    await desk.steps.journal(claim, 0.0, response=ASKS, started=(0,))
    return await lasting(desk, run_id, LIMIT - 1)


async def crashed_call(desk: Bench, crashes: int = LIMIT - 1) -> str:
    """Return a run that waits for a tool call which has lost that many workers."""
    run_id = await desk.create()
    async with working(desk) as hands:
        await hands.step(run_id, 0)
    for _ in range(crashes):
        await call_taken_over(desk, run_id, 0)
    return run_id


@asynccontextmanager
async def working(desk: Bench) -> AsyncIterator[Hands]:
    """Yield hands that do steps with real model calls."""
    hands = Hands(desk, HEAVY)
    try:
        yield hands
    finally:
        await hands.models.aclose()


async def suspect_call(desk: Bench) -> TakenCall:
    """Return such a call, taken for a minute."""
    run_id = await crashed_call(desk)
    desk.steps.calls.lease = LONG
    taken = await call_taken_over(desk, run_id, 0)
    assert taken.crashes == LIMIT - 1
    return taken


async def soon(check: Callable[[], Any]) -> None:
    async def checked() -> Any:
        return check()

    await until(checked, within=60)


@dataclass
class Trials:
    """The isolation of a worker, and what that worker holds."""

    desk: Bench
    isolation: Isolation
    leases: Leases = field(default_factory=partial(Leases, time.monotonic))

    async def attempt(self, work: Claim | TakenCall) -> bool:
        """Return whether the isolation has taken it."""
        with self.leases.hold(work) as lease:
            return await self.isolation.takes(lease, ports(self.desk))

    @asynccontextmanager
    async def waiting(self, claims: list[Claim]) -> AsyncIterator[None]:
        """Have suspects wait; hand them back afterwards, as a worker does that stops."""
        tasks = [asyncio.create_task(self.attempt(claim)) for claim in claims]
        await soon(lambda: len(self.leases) == len(claims))
        yield
        self.leases.hand_back()
        await self.isolation.aclose()
        assert await asyncio.gather(*tasks) == [True] * len(claims)

    @asynccontextmanager
    async def asking(self, claim: Claim, environment: pytest.MonkeyPatch) -> AsyncIterator[None]:
        """Have a suspect wait for its model in its process; its attempt ends afterwards."""
        with ModelServer(lambda _: Reply("slow", latency=60.0)) as model:
            environment.setenv("OPENAI_BASE_URL", model.url)
            task = asyncio.create_task(self.attempt(claim))
            await soon(lambda: model.requests)
            yield
            assert await task


Make = Callable[..., Trials]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    """Make trials as `trials` does, and leave no process behind."""
    made: list[Isolation] = []

    def make(desk: Bench, *command: str, **told: Any) -> Trials:
        made.append(trials(desk, *command, **told))
        return Trials(desk, made[-1])

    yield make
    for one in made:
        await one.aclose()


def measures(request: RequestRecord) -> Reply:
    """Ask for a tool of a queue of its own, then answer."""
    if request.turn > 1:
        return Reply("measured")
    return Reply(None, tool_calls=(ToolCallReply("measure", {"what": "it"}),))


@pytest.mark.parametrize("crashes", range(LIMIT))
async def test_a_model_call_that_was_lost_is_repeated_where_it_was_taken(
    make: Make, desk: Bench, crashes: int
) -> None:
    """DIST-08: two kills from outside make nobody wait for a process of its own."""
    claim = await suspect(desk, crashes)
    assert not await make(desk, *NEVER_BEGINS).attempt(claim)


async def test_what_ran_a_tool_is_suspect_before_the_limit(desk: Bench) -> None:
    """DIST-08: a tool that ends its workers does so three times, and not four."""
    claim = await tool_suspect(desk)
    found = claim.losses.suspicion(LIMIT)
    assert (found.stance, found.by_tools) == (Stance.SUSPECT, True)


async def test_suspects_share_a_process_and_go_on_there(
    make: Make, desk: Bench, environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """DIST-08: under their own claims; what they commit clears them."""
    claims = [await suspect(desk) for _ in range(3)]
    starts = tmp_path / "starts"
    with ModelServer(lambda _: Reply("alone")) as model:
        environment.setenv("OPENAI_BASE_URL", model.url)
        made = make(desk, sys.executable, "-c", COUNTED, str(starts))
        assert await asyncio.gather(*map(made.attempt, claims)) == [True] * 3
    for claim in claims:
        result = (await desk.stored(claim.run_id)).result()
        assert result.output == "alone"
        assert [one.kind for one in result.lost_attempts] == ["crash"] * LIMIT
    assert starts.read_text().split() == ["started"]


async def test_a_heavy_call_is_tried_in_a_process_for_suspects(
    make: Make, heavy_desk: Bench, environment: pytest.MonkeyPatch
) -> None:
    """DIST-08: beside others, whoever ends the worker would be counted against it too."""
    with ModelServer(measures) as model:
        environment.setenv("OPENAI_BASE_URL", model.url)
        taken = await suspect_call(heavy_desk)
        assert await make(heavy_desk).attempt(taken)
        async with working(heavy_desk) as hands:
            await hands.finish(taken.hint.run_id)
    result = (await heavy_desk.stored(taken.hint.run_id)).result()
    assert result.steps[0].tool_calls[0].result == "measured it"
    assert [one.kind for one in result.lost_attempts] == ["crash"] * (LIMIT - 1)


async def test_where_no_process_can_be_started_the_step_is_done_here(
    make: Make, desk: Bench
) -> None:
    claim = await suspect(desk)
    assert not await make(desk, *ENDS_AT_ONCE).attempt(claim)
    assert (await desk.header(claim.run_id))["token"] == claim.token


async def test_where_the_machine_has_no_process_to_give_the_step_waits_for_one(
    make: Make, desk: Bench
) -> None:
    claim = await suspect(desk)
    assert await make(desk, "./no-such-program").attempt(claim)
    header = await desk.header(claim.run_id)
    assert header["token"] == ""
    assert header["crashes"] == str(LIMIT)


async def test_a_process_whose_loop_stands_still_ends() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", STUCK, stdout=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(60):
        said, _ = await process.communicate()
    assert said == b"was not stuck\n"
    assert process.returncode == -signal.SIGKILL


async def test_what_dies_alone_beside_its_worker_is_given_up(make: Make, desk: Bench) -> None:
    """DIST-08: its death is known at once, and the run is free for whoever gives it up."""
    claim = await tool_suspect(desk)
    assert await make(desk, *BEGINS_AND_DIES).attempt(claim)
    again = await desk.claim(claim.run_id)
    assert again.crashes == LIMIT
    assert again.losses.known[-1] == Loss(claim.token, How.ALONE, 1)
    outcome = poisoned(again, LIMIT)
    assert outcome is not None
    assert "while tool look ran" in outcome.reason


async def test_a_call_that_dies_alone_beside_its_worker_is_given_up(
    make: Make, heavy_desk: Bench, environment: pytest.MonkeyPatch
) -> None:
    """DIST-08"""
    with ModelServer(measures) as model:
        environment.setenv("OPENAI_BASE_URL", model.url)
        taken = await suspect_call(heavy_desk)
    assert await make(heavy_desk, *BEGINS_AND_DIES).attempt(taken)
    again = await call_taken_over(heavy_desk, taken.hint.run_id, 0)
    assert again.crashes == LIMIT
    assert again.losses.suspicion(LIMIT).stance is Stance.PROVEN


async def test_a_group_that_dies_is_divided(make: Make, desk: Bench) -> None:
    """DIST-08: nobody of it is given up; each is tried once more, in smaller company."""
    runs = await asyncio.gather(*(crashed(desk) for _ in range(10)))
    claims = [await lasting(desk, run_id, LIMIT) for run_id in runs]
    await asyncio.gather(*map(make(desk, *BEGINS_AND_DIES).attempt, claims))
    for claim in claims:
        again = await desk.claim(claim.run_id)
        found = again.losses.suspicion(LIMIT)
        assert (again.crashes, found.stance, found.most) == (LIMIT + 1, Stance.SUSPECT, 2)


async def test_a_process_that_ends_with_its_worker_proves_nothing(desk: Bench) -> None:
    """DIST-08: a container, a host or its memory ends both, and whatever is in them."""
    claim = await tool_suspect(desk)
    hint = Work(claim.run_id, claim.step)
    marks = desk.opened.marks
    assert await marks.begin(hint, claim.token, 1)
    desk.steps.lease = SHORT
    await desk.steps.journal(claim, 0.0)
    again = await taken_over(desk, claim.run_id)
    assert again.crashes == LIMIT
    assert again.losses.known[-1].how is How.BOTH
    assert poisoned(again, LIMIT) is None


async def test_a_process_that_ends_while_its_worker_stops_proves_nothing(
    make: Make, desk: Bench, tmp_path: Path
) -> None:
    """DIST-08: whoever stops the one may end the other by force."""
    claim = await tool_suspect(desk)
    begun, stops = tmp_path / "begun", False
    command = (sys.executable, "-c", DIES_WHEN_TOLD, str(begun))
    made = make(desk, *command, draining=lambda: stops)
    task = asyncio.create_task(made.attempt(claim))
    await soon(begun.exists)
    stops = True
    begun.unlink()
    assert await task
    assert (await desk.header(claim.run_id))["crashes"] == str(LIMIT - 1)


async def test_a_run_that_is_retried_has_its_chances_again(
    make: Make, desk: Bench, redis_url: str
) -> None:
    """DIST-08: what its step did to a process before the retry is not held against it."""
    claim = await tool_suspect(desk)
    assert await make(desk, *BEGINS_AND_DIES).attempt(claim)
    claim = await desk.claim(claim.run_id)
    outcome = poisoned(claim, LIMIT)
    assert outcome is not None
    await desk.commit(claim, Prevented(Span(claim.now, 0.0), outcome))
    async with AsyncFleet(redis_url) as fleet:
        await fleet.runs.retry(claim.run_id)
    again = await desk.claim(claim.run_id)
    assert (again.crashes, again.losses.known) == (0, ())


async def test_an_owner_that_still_writes_was_not_lost(desk: Bench) -> None:
    """DIST-08: a worker that stood still, or whose store had another time, makes no suspects."""
    run_id = await desk.create()
    late = await taken_over(desk, run_id)
    again = await taken_over(desk, run_id)
    assert again.crashes == 1
    assert not (await desk.steps.journal(late, 1.0)).ours
    assert (await desk.header(run_id))["crashes"] == "0"
    third = await taken_over(desk, run_id)
    assert third.crashes == 1
    await desk.steps.commit(again, Verdict(Move.RELEASE, again.state), Events([]))
    assert (await desk.header(run_id))["crashes"] == "0"
    kinds = [one.kind for one in (await desk.stored(run_id)).result().lost_attempts]
    assert kinds == ["late", "late"]


async def test_a_call_whose_owner_still_writes_was_not_lost(
    heavy_desk: Bench, environment: pytest.MonkeyPatch
) -> None:
    """DIST-08"""
    with ModelServer(measures) as model:
        environment.setenv("OPENAI_BASE_URL", model.url)
        run_id = await crashed_call(heavy_desk, 0)
    late = await call_taken_over(heavy_desk, run_id, 0)
    assert (await call_taken_over(heavy_desk, run_id, 0)).crashes == 1
    assert not (await heavy_desk.steps.calls.keep(late.hint, late.token, 1.0)).ours
    assert (await call_taken_over(heavy_desk, run_id, 0)).crashes == 1


async def test_what_goes_on_losing_workers_is_tried_at_growing_intervals(
    make: Make, desk: Bench
) -> None:
    """DIST-08: without a proof it is no suspect's fault that workers end."""
    claim = await suspect(desk, LIMIT + 5)
    assert await make(desk, grace=60.0).attempt(claim)
    due = await desk.due(claim.run_id)
    now = (await desk.runs.now()).timestamp() * 1000
    assert due is not None
    assert due > now + 200_000
    assert (await desk.header(claim.run_id))["token"] == ""


async def test_suspects_without_a_place_wait_under_their_leases_and_are_handed_back(
    make: Make, desk: Bench
) -> None:
    """DIST-08: nothing is dispatched again for them; a worker that stops counts no crash."""
    claims = [await tool_suspect(desk) for _ in range(3)]
    async with make(desk, *NEVER_BEGINS, processes=1).waiting(claims):
        for claim in claims:
            assert (await desk.header(claim.run_id))["token"] == claim.token
    for claim in claims:
        header = await desk.header(claim.run_id)
        assert (header["token"], header["crashes"]) == ("", str(LIMIT - 1))


async def test_what_a_process_for_suspects_does_is_handed_back(
    make: Make, desk: Bench, environment: pytest.MonkeyPatch
) -> None:
    """DIST-08: the process hears of it, and commits what there is."""
    claim, made = await suspect(desk), make(desk)
    async with made.asking(claim, environment):
        made.leases.hand_back()
    header = await desk.header(claim.run_id)
    assert (header["token"], header["crashes"]) == ("", str(LIMIT))


async def test_a_cancel_reaches_a_process_for_suspects(
    make: Make, desk: Bench, environment: pytest.MonkeyPatch
) -> None:
    """DIST-09"""
    claim, made = await suspect(desk), make(desk)
    async with made.asking(claim, environment):
        await desk.control.cancel(await desk.stored(claim.run_id), "enough")
        made.leases.held[claim.hint].interrupt(Interruption.CANCELLED)
    assert (await desk.stored(claim.run_id)).result().status == "cancelled"


async def test_a_cancel_that_arrives_while_a_suspect_waits_ends_the_run(
    make: Make, desk: Bench
) -> None:
    """DIST-09"""
    claims = [await tool_suspect(desk) for _ in range(2)]
    await desk.control.cancel(await desk.stored(claims[1].run_id), "enough")
    async with make(desk, *NEVER_BEGINS, processes=1).waiting(claims):
        pass
    again = await desk.claim(claims[1].run_id)
    assert again.state.stop_requested


async def test_what_has_begun_goes_on_when_its_worker_dies(
    desk: Bench, environment: pytest.MonkeyPatch, redis_url: str
) -> None:
    """DIST-08: its process renews the lease by itself; no call is made again."""
    run_id = await crashed(desk)
    with ModelServer(lambda _: Reply("alone", latency=1.0)) as model:
        environment.setenv("OPENAI_BASE_URL", model.url)
        given = (redis_url, str(AGENTS), "plain", run_id, str(LONG))
        environment.setenv("PYTHONPATH", str(TESTS))
        starter = await asyncio.create_subprocess_exec(
            sys.executable, "-m", trial_starter.__name__, *given
        )
        try:
            await soon(lambda: model.requests)
        finally:
            starter.kill()
            await starter.wait()

        async def has_ended() -> bool:
            return (await desk.stored(run_id)).state.status.is_terminal

        await until(has_ended, within=60)
        assert len(model.requests) == 1
    result = (await desk.stored(run_id)).result()
    assert result.output == "alone"
    assert [one.kind for one in result.lost_attempts] == ["crash"] * LIMIT
