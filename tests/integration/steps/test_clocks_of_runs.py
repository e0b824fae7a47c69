"""The three clocks of a run through whole steps; durations by a clock that the test moves."""

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest
from support.deadlines import until
from support.runs.opened_runs import opened_run
from support.runs.scripted_steps import Hands, Script, call, say
from support.runs.stored_runs import Bench

from stepfleet.orchestrator import (
    Agent,
    ErrorPolicy,
    Message,
    SlimSerializationConfig,
    SlimSerializer,
    StopReason,
    tool,
)
from stepfleet.orchestrator.errors import ModelError
from stepfleet.orchestrator.protocol.claim import Work
from stepfleet.orchestrator.protocol.revision import further_turn
from stepfleet.worker.leases.lease import Leases
from stepfleet.worker.step import run_work

DAY = 24 * 3600


@dataclass
class Clock:
    """A monotonic clock that stands still until it is moved."""

    seconds: float = 1000.0

    def __call__(self) -> float:
        return self.seconds


@tool(read_only=True)
async def nap(seconds: float) -> str:
    """Sleep."""
    await asyncio.sleep(seconds)  # a slow tool: its time is what is tested
    return "rested"


async def session_is_older(desk: Bench, run_id: str, seconds: int) -> None:
    """Move the beginning of a session into the past."""
    header = await desk.header(run_id)
    for name in ("created", "execution_started"):
        if name in header:
            old = int(header[name]) - seconds * 1000
            await desk.opened.connection.execute("HSET", desk.opened.keys.run(run_id), name, old)


async def test_the_first_claim_starts_the_clock_of_the_execution(redis_url: str) -> None:
    """TIME-02, TIME-06: a run that waits in the queue has none yet."""
    async with opened_run(redis_url, say("done")) as (desk, hands, run_id):
        created = (await desk.stored(run_id)).state.info
        before = await desk.runs.now()
        await hands.step(run_id, 0)
        info = (await desk.stored(run_id)).state.info
    assert created.execution_started_at is None
    assert info.execution_started_at is not None
    assert before <= info.execution_started_at <= info.updated_at
    assert info.started_at == created.started_at


@pytest.mark.parametrize("age", [DAY, 7 * DAY])
async def test_a_further_turn_on_an_old_session_has_all_its_time(redis_url: str, age: int) -> None:
    """TIME-03, TIME-04, TIME-06: the start of an execution is not restored but set anew."""
    async with opened_run(redis_url, say("first"), say("second"), time_limit=300) as (
        desk,
        hands,
        run_id,
    ):
        await hands.finish(run_id)
        await session_is_older(desk, run_id, age)
        old = await desk.stored(run_id)
        assert old.state.to_dict()["info"]["execution_started_at"]
        turn = further_turn(old.state, old.log, {}, await desk.runs.now())
        assert turn.state.info.execution_started_at is None
        await desk.control.retry(old, turn, (Message.user("and now?"),))
        await hands.finish(run_id)
        stored = await desk.stored(run_id)
    assert stored.result().stop_reason is StopReason.COMPLETED
    assert stored.result().output == "second"
    assert stored.state.info.execution_started_at is not None
    assert (stored.state.info.execution_started_at - old.state.info.started_at).days >= age // DAY
    assert stored.state.info.started_at == old.state.info.started_at


async def test_a_snapshot_does_not_bring_back_when_its_execution_began(redis_url: str) -> None:
    """TIME-04: told for debugging, None behind a reload, and set by the next run."""
    async with opened_run(redis_url, say("first"), say("second")) as (desk, hands, run_id):
        await hands.finish(run_id)
        old = await desk.stored(run_id)
        assert old.state.to_dict()["info"]["execution_started_at"]
        snapshot = SlimSerializer(SlimSerializationConfig.full()).serialize(old.state)
        loaded = SlimSerializer().deserialize(snapshot)
        assert loaded.info.execution_started_at is None
        assert loaded.info.started_at == old.state.info.started_at
        before = await desk.runs.now()
        turn = further_turn(loaded, old.log, {}, before)
        await desk.control.retry(old, turn, (Message.user("and now?"),))
        await hands.finish(run_id)
        info = (await desk.stored(run_id)).state.info
    assert info.execution_started_at is not None
    assert info.execution_started_at >= before


async def test_between_the_steps_of_an_execution_its_start_is_kept(redis_url: str) -> None:
    """TIME-05, CONT-17: an execution that began long ago ends at the wall-clock limit."""
    script = call(("nap", {"seconds": 0.0}))
    async with opened_run(redis_url, script, tools=(nap,), time_limit=60) as (
        desk,
        hands,
        run_id,
    ):
        await hands.step(run_id, 0)
        first = (await desk.stored(run_id)).state.info
        await session_is_older(desk, run_id, 61)
        await Hands(desk, hands.agent).step(run_id, 1)
        stored = await desk.stored(run_id)
    assert stored.result().stop_reason is StopReason.TIME_LIMIT
    assert first.execution_started_at is not None
    assert stored.state.info.execution_started_at is not None
    moved = first.execution_started_at - stored.state.info.execution_started_at
    assert moved.total_seconds() == 61


async def test_a_step_lasts_from_before_its_call_to_behind_its_tools(redis_url: str) -> None:
    """TIME-10"""

    async def slow(_: Any) -> Any:
        await asyncio.sleep(0.1)  # a slow model
        return call(("nap", {"seconds": 0.1}))

    async with opened_run(redis_url, slow, say("done"), tools=(nap,)) as (desk, hands, run_id):
        await hands.step(run_id, 0)
        (step,) = (await desk.stored(run_id)).result().steps
    assert step.duration_ms >= 200
    assert step.started_at <= step.tool_calls[0].timestamp


async def test_a_step_of_75_seconds_is_reported_as_75_000_milliseconds(redis_url: str) -> None:
    """TIME-11, TIME-12, trap F8: in the record, in the event and in the sum."""
    clock = Clock()

    async def long(_: Any) -> Any:
        clock.seconds += 75
        return say("done")

    async with opened_run(redis_url, long) as (desk, hands, run_id):
        ports = hands.ports()
        await run_work(Work(run_id, 0), ports, Leases(clock))
        result = (await desk.stored(run_id)).result()
        events, _ = await desk.runs.events(run_id)
    (told,) = [one["payload"] for one in events if one["type"] == "agent.step.completed"]
    assert result.steps[0].duration_ms == told["duration_ms"] == 75_000
    assert result.cumulative_execution_seconds == 75


async def test_failed_steps_count_and_the_waits_between_them_do_not(redis_url: str) -> None:
    """TIME-14, TIME-15: three failing steps of one second are three seconds."""
    clock = Clock()

    async def fails(_: Any) -> Any:
        clock.seconds += 1
        raise ModelError("bad request")

    policy = ErrorPolicy.retry_all(3)
    async with opened_run(redis_url, fails, error_policy=policy) as (desk, hands, run_id):
        ports = hands.ports()

        async def ended() -> bool:
            clock.seconds += 10
            step = (await desk.stored(run_id)).step
            await run_work(Work(run_id, step), ports, Leases(clock))
            return (await desk.stored(run_id)).state.status.is_terminal

        await until(ended, within=60)
        result = (await desk.stored(run_id)).result()
    assert result.stop_reason is StopReason.RETRY_LIMIT
    assert [step.duration_ms for step in result.steps] == [1000, 1000, 1000]
    assert result.cumulative_execution_seconds == 3


async def test_the_time_in_a_queue_is_not_the_runs_own(redis_url: str) -> None:
    """TIME-14: five runs behind one worker's single slot wait for each other."""
    clock = Clock()

    async def slow(_: Any) -> Any:
        clock.seconds += 10
        return say("done")

    async with opened_run(redis_url, slow, cumulative_timeout=15) as (desk, hands, first):
        run_ids = [first, *[await desk.create() for _ in range(4)]]
        ports, leases = hands.ports(), Leases(clock)
        for ahead, run_id in enumerate(run_ids):
            await session_is_older(desk, run_id, 10 * ahead)
            await run_work(Work(run_id, 0), ports, leases)
        results = [(await desk.stored(run_id)).result() for run_id in run_ids]
        waited = float((await desk.header(run_ids[-1]))["created"]) / 1000
    assert all(result.success for result in results)
    assert [result.cumulative_execution_seconds for result in results] == [10] * 5
    end = results[-1].end_time
    assert end is not None
    assert end.timestamp() - waited > 15


async def test_an_hour_of_pause_does_not_count(redis_url: str) -> None:
    """TIME-13, CKPT-11: resumed on another worker, the run finishes within its limit."""
    clock = Clock()

    async def two_seconds(request: Any) -> Any:
        clock.seconds += 2
        return say("done") if len(request.messages) > 4 else call(("nap", {"seconds": 0.0}))

    async with opened_run(redis_url, two_seconds, tools=(nap,), cumulative_timeout=7) as (
        desk,
        hands,
        run_id,
    ):
        ports = hands.ports()
        for step in range(2):
            await run_work(Work(run_id, step), ports, Leases(clock))
        await desk.control.pause(run_id)
        clock.seconds += 3600
        await session_is_older(desk, run_id, 3600)
        await desk.control.resume(await desk.stored(run_id))
        other = Hands(desk, hands.agent).ports()
        await run_work(Work(run_id, 2), other, Leases(clock))
        result = (await desk.stored(run_id)).result()
    assert result.success
    assert result.cumulative_execution_seconds == 6


async def test_parallel_tools_add_their_span_and_not_their_sum(redis_url: str) -> None:
    """TIME-21, TOOL-14: three calls of 30 seconds at once, and one after the other."""
    clock = Clock()
    at_once = asyncio.Barrier(1)

    @tool(read_only=True)
    async def rest() -> str:
        """Take half a minute."""
        over = clock.seconds + 30
        await at_once.wait()  # until all that run at once have begun
        clock.seconds = over
        return "rested"

    three = call(*[("rest", {})] * 3)
    spans = {}
    for parallel in (True, False):
        at_once = asyncio.Barrier(3 if parallel else 1)
        async with opened_run(
            redis_url, three, say("done"), tools=(rest,), parallel_tool_execution=parallel
        ) as (desk, hands, run_id):
            ports = hands.ports()
            await run_work(Work(run_id, 0), ports, Leases(clock))
            spans[parallel] = (await desk.stored(run_id)).result().cumulative_execution_seconds
    assert spans == {True: 30, False: 90}


async def test_an_agent_with_a_cumulative_limit_has_no_wall_clock_limit(redis_url: str) -> None:
    """TIME-18: as the stored outcome shows it."""
    script = Script((say("done"),))
    plain = Agent("scripted", model=script)
    names = []
    for agent in (plain, plain.with_cumulative_timeout(60)):
        async with opened_run(redis_url) as (desk, _, _):
            desk.agent = agent
            run_id = await desk.create()
            await Hands(desk, agent).finish(run_id)
            outcome = (await desk.stored(run_id)).result().outcome
            assert outcome is not None
            names.append([one.criterion for one in outcome.evaluations])
    wall, cumulative = "ExecutionTimeLimit", "CumulativeExecutionTimeLimit"
    assert (wall in names[0], cumulative in names[0]) == (True, False)
    assert (wall in names[1], cumulative in names[1]) == (False, True)
