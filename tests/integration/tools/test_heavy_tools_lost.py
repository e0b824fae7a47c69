"""Calls of heavy tools whose worker, message, reply or step is lost: once each, and all listed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from support.runs.heavy_calls import (
    HEAVY,
    ONE,
    call_lease_runs_out,
    crashing_store,
    journal,
    lost,
    measure,
    messages,
    overdue,
    render,
    rescued,
    result_of,
)
from support.runs.opened_runs import Opened, opened_run
from support.runs.scripted_steps import Crash, Hands, call, say
from support.runs.stored_runs import Bench
from support.runs.waits import awaited, let_pass

from stepfleet.orchestrator import ErrorPolicy, tool
from stepfleet.orchestrator.protocol.claim import Refused, Work
from stepfleet.orchestrator.protocol.waiting import TakenCall


@pytest.fixture
def opened(redis_url: str) -> Opened:
    """A call is held for a minute: its lease runs out where a test lets it, not before."""

    @asynccontextmanager
    async def open_run(*answers: Any, **config: Any) -> AsyncIterator[tuple[Bench, Hands, str]]:
        async with opened_run(redis_url, *answers, **config) as (desk, hands, run_id):
            desk.steps.calls.lease = 60.0
            yield desk, hands, run_id

    return open_run


async def test_a_call_has_one_owner_and_a_repeated_delivery_changes_nothing(
    opened: Opened,
) -> None:
    """DIST-05: duplicates of hints and of deliveries."""
    async with opened(*ONE, tools=(render,)) as (desk, hands, run_id):
        await hands.step(run_id, 0)
        first, second = await asyncio.gather(hands.call(run_id, 0, 0), hands.call(run_id, 0, 0))
        reports = [first, second]
        refused = [one.refusal for one in reports if one.refusal]
        assert [one.why for one in refused] == [Refused.LEASED]
        again = await hands.call(run_id, 0, 0)
        assert again.refusal is not None
        assert again.refusal.why is Refused.STALE
        await hands.finish(run_id)
        late = await hands.call(run_id, 0, 0)
        assert late.refusal is not None
        result = (await desk.stored(run_id)).result()
    assert result.success
    assert result.lost_attempts == ()


@pytest.mark.parametrize("point", ["call-taken", "call-made"])
async def test_a_call_whose_worker_died_is_not_run_again_unless_it_is_idempotent(
    opened: Opened, point: str
) -> None:
    """TOOL-26, DIST-08: its outcome is unknown; a call that only reads runs again."""
    policy = ErrorPolicy.ignore_tool_errors()
    script = (call(("render", {"what": "a"}), ("measure", {"what": "b"})), say("done"))
    async with opened(
        *script, tools=(render, measure), parallel_tool_execution=True, error_policy=policy
    ) as (desk, hands, run_id):
        await hands.step(run_id, 0)
        for index in (0, 1):
            crashing = Hands(desk, hands.agent, crash_at=point)
            with pytest.raises(Crash):
                await crashing.call(run_id, 0, index)
            held = await hands.call(run_id, 0, index)
            assert held.refusal is not None
            assert held.refusal.why is Refused.LEASED
            await call_lease_runs_out(desk, run_id, index)
            assert (await hands.call(run_id, 0, index)).applied
        await hands.finish(run_id)
        result = (await desk.stored(run_id)).result()
    unknown, again = result.steps[0].tool_calls
    assert unknown.error is not None
    assert unknown.error.code == "OUTCOME_UNKNOWN"
    assert (again.result, again.repeated) == ("measured b", True)
    assert [one.kind for one in result.lost_attempts] == ["crash", "crash"]
    assert not any(one.ambiguous for one in result.lost_attempts)


async def test_a_status_hook_is_asked_for_a_heavy_call_that_was_lost(opened: Opened) -> None:
    def status(invocation: Any) -> str:
        return f"booked under {invocation.idempotency_key[:4]}"

    @tool(queue=HEAVY, status=status)
    def book() -> str:
        """Book."""
        return "never reached again"

    async with opened(call(("book", {})), say("done"), tools=(book,)) as (desk, hands, run_id):
        await hands.step(run_id, 0)
        with pytest.raises(Crash):
            await Hands(desk, hands.agent, crash_at="call-taken").call(run_id, 0, 0)
        await call_lease_runs_out(desk, run_id)
        await hands.call(run_id, 0, 0)
        await hands.finish(run_id)
        result = (await desk.stored(run_id)).result()
    assert str(result.steps[0].tool_calls[0].result).startswith("booked under")


async def test_a_call_that_ends_its_worker_again_and_again_is_given_up(opened: Opened) -> None:
    """Poison: exactly three deaths that a parent has seen, then an error that names the tool."""
    policy = ErrorPolicy.ignore_tool_errors()
    script = (call(("measure", {"what": "b"})), say("done"))
    async with opened(*script, tools=(measure,), error_policy=policy) as (desk, hands, run_id):
        await hands.step(run_id, 0)
        for _ in range(3):
            with pytest.raises(Crash):
                await Hands(desk, hands.agent, crash_at="call-taken").call(run_id, 0, 0)
            assert await desk.marks.child_died(Work(run_id, 0, 0), "test")
        assert (await hands.call(run_id, 0, 0)).applied
        await hands.finish(run_id)
        result = (await desk.stored(run_id)).result()
    error = result.steps[0].tool_calls[0].error
    assert error is not None
    assert error.code == "WORKER_LOST"
    assert "measure" in error.message
    assert len(result.lost_attempts) == 3


async def test_a_reply_that_was_lost_behind_a_delivery_is_known_again(opened: Opened) -> None:
    """DIST-05: the script knows its own token, also when the step was committed meanwhile."""
    async with opened(*ONE, tools=(render,)) as (desk, hands, run_id):
        await hands.step(run_id, 0)
        calls = desk.steps.calls
        taken = await calls.take(Work(run_id, 0, 0), "mine")
        assert isinstance(taken, TakenCall)
        assert (taken.call.name, taken.attempt) == ("render", 1)
        for _ in range(2):
            assert (await calls.deliver(taken, "scripted", result_of(taken), 0.1)).applied
        assert await desk.queued() == 2
        await hands.finish(run_id)
        assert (await calls.deliver(taken, "scripted", result_of(taken), 0.1)).applied
        assert await lost(desk, run_id) == []


async def test_a_late_result_of_another_owners_call_is_refused_and_listed(opened: Opened) -> None:
    """DIST-05: the worker that slept past its lease changes nothing."""
    async with opened(*ONE, tools=(render,)) as (desk, hands, run_id):
        await hands.step(run_id, 0)
        calls = desk.steps.calls
        taken = await calls.take(Work(run_id, 0, 0), "sleeper")
        assert isinstance(taken, TakenCall)
        await call_lease_runs_out(desk, run_id)
        assert (await hands.call(run_id, 0, 0)).applied
        assert not (await calls.keep(taken.hint, "sleeper", 1.0)).ours
        late = await calls.deliver(taken, "scripted", result_of(taken), 0.1)
        assert not late.applied
        assert await lost(desk, run_id) == ["late"]
        await hands.finish(run_id)
        result = (await desk.stored(run_id)).result()
    assert result.steps[0].tool_calls[0].error is not None


async def test_a_lost_task_is_dispatched_again_and_a_held_one_is_left_alone(
    opened: Opened,
) -> None:
    """DIST-06, DIST-10: the rescuer looks at the call, not at the step."""
    async with opened(*ONE, tools=(render,)) as (desk, hands, run_id):
        await hands.step(run_id, 0)
        await desk.opened.connection.execute("DEL", HEAVY, desk.opened.settings.queue)
        await call_lease_runs_out(desk, run_id)
        assert await messages(desk) == [[run_id, 0, 0]]
        assert await desk.queued() == 0
        taken = await desk.steps.calls.take(Work(run_id, 0, 0), "t")
        assert isinstance(taken, TakenCall)
        await overdue(desk, run_id)
        assert await rescued(desk) == 0
        due = await desk.due(run_id)
        assert due is not None
        assert due == float((await journal(desk, run_id))["n:0"])


async def test_a_crash_right_behind_parking_or_delivery_loses_nothing(opened: Opened) -> None:
    """DIST-08: what was to be published is found by the rescuer."""
    async with opened(*ONE, tools=(render,)) as (desk, hands, run_id):
        with pytest.raises(Crash):
            await crashing_store(desk, "tool-parked").step(run_id, 0)
        assert await awaited(desk, run_id) == ["0:gpu:render"]
        with pytest.raises(Crash):
            await crashing_store(desk, "call-delivered").call(run_id, 0, 0)
        await hands.finish(run_id)
        result = (await desk.stored(run_id)).result()
    assert result.success
    assert result.lost_attempts == ()


async def test_a_result_that_comes_behind_the_end_of_its_run_lives_no_longer_than_that(
    opened: Opened,
) -> None:
    """DIST-05: its entry of the ledger is the first one, and expires with the run."""
    async with opened(*ONE, tools=(render,), time_limit=60) as (desk, hands, run_id):
        await hands.step(run_id, 0)
        calls = desk.steps.calls
        taken = await calls.take(Work(run_id, 0, 0), "t")
        assert isinstance(taken, TakenCall)
        await time_passes(desk, run_id, 61)
        assert (await hands.step(run_id, 0)).applied
        assert (await desk.stored(run_id)).state.status.is_terminal
        await desk.keep_up()
        assert not (await calls.deliver(taken, "scripted", result_of(taken), 0.1)).applied
        assert await lost(desk, run_id) == ["late"]
        key = f"{desk.opened.keys.run(run_id)}:lost"
        assert await desk.opened.connection.execute("PTTL", key) > 0


async def time_passes(desk: Bench, run_id: str, seconds: int) -> None:
    """Move the times by which a waiting run is judged into the past."""
    key = desk.opened.keys.run(run_id)
    await desk.opened.connection.execute("HINCRBY", key, "execution_started", -1000 * seconds)
    await let_pass(desk, run_id, 1000 * seconds)


async def test_a_stopping_worker_gives_its_call_back_without_a_crash(opened: Opened) -> None:
    """DIST-11: a call that only reads runs again elsewhere."""
    started = asyncio.Event()
    hold = asyncio.Event()

    @tool(queue=HEAVY, read_only=True)
    async def slow() -> str:
        """Wait until the test says so."""
        started.set()
        await hold.wait()
        return "at last"

    async with opened(call(("slow", {})), say("done"), tools=(slow,)) as (desk, hands, run_id):
        await hands.step(run_id, 0)
        making = asyncio.create_task(hands.call(run_id, 0, 0))
        await started.wait()
        hands.leases.hand_back()
        assert (await making).record is None
        hold.set()
        await overdue(desk, run_id)
        assert await rescued(desk) == 1
        heir = Hands(desk, hands.agent)
        assert (await heir.call(run_id, 0, 0)).applied
        await heir.finish(run_id)
        result = (await desk.stored(run_id)).result()
    assert result.steps[0].tool_calls[0].result == "at last"
    assert [one.kind for one in result.lost_attempts] == ["interrupted"]


async def test_a_caller_whose_death_was_counted_is_not_answered_that_it_has_delivered(
    opened: Opened,
) -> None:
    async with opened(*ONE, tools=(render,)) as (desk, hands, run_id):
        await hands.step(run_id, 0)
        calls, hint = desk.steps.calls, Work(run_id, 0, 0)
        taken = await calls.take(hint, "mine")
        assert isinstance(taken, TakenCall)
        assert await desk.marks.child_died(hint, "test")
        assert not (await calls.deliver(taken, "scripted", result_of(taken), 0.1)).applied
        assert not isinstance(await calls.take(hint, "mine"), TakenCall)
        assert (await hands.call(run_id, 0, 0)).applied
