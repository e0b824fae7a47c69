"""Tools with a queue of their own: the step parks, other workers deliver, the step goes on."""

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from deadlines import until
from opened_runs import opened_run
from scripted_steps import Crash, Hands, Script, call, say
from stored_runs import Bench, bench

from stepfleet.orchestrator import Agent, ErrorPolicy, tool
from stepfleet.orchestrator.protocol.claim import Refused
from stepfleet.orchestrator.protocol.revision import revise
from stepfleet.orchestrator.protocol.verdict import Move
from stepfleet.orchestrator.protocol.waiting import Kept, NotTaken, TakenCall, ToolHint
from stepfleet.orchestrator.records.outcome import StopReason
from stepfleet.orchestrator.records.responses import ModelRequest
from stepfleet.orchestrator.records.results import RunStatus
from stepfleet.orchestrator.records.tools import ToolCallRecord
from stepfleet.orchestrator.store.steps import StepStore
from stepfleet.orchestrator.tools import StateUpdate, current_invocation
from stepfleet.worker.call_leases import CallLease
from stepfleet.worker.inline import InlineWorker
from stepfleet.worker.rescuer import Rescuer

Opened = Callable[..., AbstractAsyncContextManager[tuple[Bench, Hands, str]]]
HEAVY = "gpu"


@pytest.fixture
def opened(redis_url: str) -> Opened:
    return partial(opened_run, redis_url)


@tool(queue=HEAVY)
async def render(what: str) -> str:
    """Take a while on another machine."""
    await asyncio.sleep(0.05)
    return f"rendered {what}"


@tool(queue=HEAVY, read_only=True)
def measure(what: str) -> str:
    """Measure on another machine."""
    return f"measured {what}"


@tool(read_only=True)
def look(what: str) -> str:
    """Look something up, in the step."""
    return f"seen {what}"


ONE = (call(("render", {"what": "a"})), say("done"))


def requests(hands: Hands) -> list[ModelRequest]:
    assert isinstance(hands.agent.llm, Script)
    return hands.agent.llm.requests


async def messages(desk: Bench, queue: str = HEAVY) -> list[Any]:
    """Return the arguments of the tasks that wait in a queue, the next one last."""
    found = await desk.opened.connection.execute("LRANGE", queue, 0, -1)
    shown = [json.loads(text)["headers"] for text in found]
    return [json.loads(one["argsrepr"].replace("'", '"')) for one in shown]


async def journal(desk: Bench, run_id: str) -> dict[str, str]:
    key = f"{desk.opened.keys.run(run_id)}:journal"
    return dict(await desk.opened.connection.execute("HGETALL", key))


async def lost(desk: Bench, run_id: str) -> list[str]:
    return sorted(one.kind for one in (await desk.stored(run_id)).lost)


async def call_lease_runs_out(desk: Bench, run_id: str, index: int = 0) -> None:
    key = f"{desk.opened.keys.run(run_id)}:journal"
    await desk.opened.connection.execute("HSET", key, f"l:{index}", 1, f"n:{index}", 1)
    await overdue(desk, run_id)
    assert await rescued(desk) == 1


async def test_a_step_parks_without_a_lease_and_its_call_waits_in_the_tools_queue(
    opened: Opened,
) -> None:
    """MULTI-08, DIST-15: no slot is held, nothing is logged, the hint has ids only."""
    async with opened(*ONE, tools=(render,)) as (desk, hands, run_id):
        report = await hands.step(run_id, 0)
        assert report.verdict is not None
        assert report.verdict.move is Move.WAIT
        assert len(hands.leases) == 0
        header = await desk.header(run_id)
        assert (header["token"], header["waiting"]) == ("", "0 0:gpu:render")
        stored = await desk.stored(run_id)
        assert (stored.step, stored.state.step_count) == (0, 0)
        assert await messages(desk) == [[run_id, 0, 0]]
        assert (await desk.refused(run_id)).why is Refused.EARLY
        assert "s:0" not in await journal(desk, run_id)


async def test_a_delivered_result_makes_the_run_due_and_its_step_goes_on(opened: Opened) -> None:
    """MULTI-08: one model call, one start, one commit; the heavy time counts once."""
    async with opened(*ONE, tools=(render,)) as (desk, hands, run_id):
        before = await desk.queued()
        await hands.step(run_id, 0)
        made = await hands.call(run_id, 0, 0)
        assert made.applied
        assert await desk.queued() == before + 1
        await hands.finish(run_id)
        stored = await desk.stored(run_id)
        result = stored.result()
    assert result.success
    assert len(requests(hands)) == 2
    record = result.steps[0].tool_calls[0]
    assert (record.result, record.repeated) == ("rendered a", False)
    assert record.duration_ms is not None
    assert result.steps[0].duration_ms >= record.duration_ms >= 50
    total = sum(step.duration_ms for step in result.steps) / 1000
    assert result.cumulative_execution_seconds == pytest.approx(total)
    assert stored.lost == ()
    assert [step.usage.llm_calls for step in result.steps if step.usage] == [1, 1]
    assert result.steps[0].started_at < result.steps[1].started_at


async def test_heavy_time_is_counted_once_where_calls_run_at_the_same_time(
    opened: Opened,
) -> None:
    """Each call's worker time is added; waiting in a queue is not."""
    script = (call(("render", {"what": "a"}), ("render", {"what": "b"})), say("done"))
    async with opened(*script, tools=(render,), parallel_tool_execution=True) as (
        desk,
        hands,
        run_id,
    ):
        await hands.step(run_id, 0)
        await asyncio.gather(hands.call(run_id, 0, 0), hands.call(run_id, 0, 1))
        spent = int((await journal(desk, run_id))["spent"])
        await hands.finish(run_id)
        result = (await desk.stored(run_id)).result()
    calls = [record.duration_ms or 0 for record in result.steps[0].tool_calls]
    assert spent >= sum(calls) - 2
    assert result.steps[0].duration_ms >= spent


async def test_calls_at_once_run_light_ones_first_and_wait_for_all_heavy_ones_together(
    opened: Opened,
) -> None:
    script = (
        call(("render", {"what": "a"}), ("look", {"what": "b"}), ("measure", {"what": "c"})),
        say("done"),
    )
    async with opened(*script, tools=(render, look, measure), parallel_tool_execution=True) as (
        desk,
        hands,
        run_id,
    ):
        await hands.step(run_id, 0)
        assert (await desk.header(run_id))["waiting"] == "0 0:gpu:render 2:gpu:measure"
        assert "r:1" in await journal(desk, run_id)
        assert (await hands.call(run_id, 0, 2)).applied
        assert (await desk.header(run_id))["waiting"] == "0 0:gpu:render"
        assert (await desk.refused(run_id)).why is Refused.EARLY
        assert (await hands.call(run_id, 0, 0)).applied
        await hands.finish(run_id)
        result = (await desk.stored(run_id)).result()
    assert [one.result for one in result.steps[0].tool_calls] == [
        "rendered a",
        "seen b",
        "measured c",
    ]


async def test_calls_in_order_stay_in_order_around_a_heavy_one(opened: Opened) -> None:
    """TOOL-14: what the model asked for behind a heavy call starts after its result."""
    ran: list[str] = []

    @tool(queue=HEAVY)
    def heavy() -> str:
        """Note it."""
        ran.append("heavy")
        return "h"

    @tool
    def light(what: str) -> str:
        """Note it."""
        ran.append(what)
        return what

    script = (call(("light", {"what": "1"}), ("heavy", {}), ("light", {"what": "2"})), say("done"))
    async with opened(*script, tools=(heavy, light)) as (desk, hands, run_id):
        await hands.step(run_id, 0)
        assert ran == ["1"]
        await hands.call(run_id, 0, 1)
        await hands.finish(run_id)
        result = (await desk.stored(run_id)).result()
    assert ran == ["1", "heavy", "2"]
    assert [one.result for one in result.steps[0].tool_calls] == ["1", "h", "2"]


async def test_a_call_has_one_owner_and_a_repeated_delivery_changes_nothing(
    opened: Opened,
) -> None:
    """DIST-05: duplicates of hints and of deliveries."""
    async with opened(*ONE, tools=(render,)) as (desk, hands, run_id):
        await hands.step(run_id, 0)
        first, second = await asyncio.gather(hands.call(run_id, 0, 0), hands.call(run_id, 0, 0))
        reports = [first, second]
        refused = [one.refusal for one in reports if one.refusal]
        assert [one.why for one in refused] == [NotTaken.LEASED]
        again = await hands.call(run_id, 0, 0)
        assert again.refusal is not None
        assert again.refusal.why is NotTaken.STALE
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
            assert held.refusal.why is NotTaken.LEASED
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
    """Poison: exactly three crashes, then an error that names the tool."""
    policy = ErrorPolicy.ignore_tool_errors()
    script = (call(("measure", {"what": "b"})), say("done"))
    async with opened(*script, tools=(measure,), error_policy=policy) as (desk, hands, run_id):
        await hands.step(run_id, 0)
        for _ in range(3):
            with pytest.raises(Crash):
                await Hands(desk, hands.agent, crash_at="call-taken").call(run_id, 0, 0)
            await call_lease_runs_out(desk, run_id)
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
        taken = await calls.take(ToolHint(run_id, 0, 0), "mine")
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
        taken = await calls.take(ToolHint(run_id, 0, 0), "sleeper")
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


async def test_a_cancel_ends_a_waiting_run_at_once_and_its_late_result_is_listed(
    opened: Opened,
) -> None:
    """DIST-09: the answer that was paid for is listed with its price."""
    async with opened(*ONE, tools=(render,)) as (desk, hands, run_id):
        await hands.step(run_id, 0)
        taken = await desk.steps.calls.take(ToolHint(run_id, 0, 0), "t")
        assert isinstance(taken, TakenCall)
        answer = await desk.control.cancel(await desk.stored(run_id), "enough")
        assert (answer.word, answer.in_hands) == ("cancelled", True)
        assert not (await desk.steps.calls.keep(taken.hint, "t", 0.1)).ours
        late = await desk.steps.calls.deliver(taken, "scripted", result_of(taken), 0.1)
        assert (late.applied, late.status) == (False, "cancelled")
        result = (await desk.stored(run_id)).result()
        expiry = await desk.opened.connection.execute(
            "PTTL", f"{desk.opened.keys.run(run_id)}:lost"
        )
        assert expiry > 0
        assert await desk.due(run_id) is None
    assert result.stop_reason is StopReason.USER_REQUESTED
    kinds = {one.kind: one for one in result.lost_attempts}
    assert set(kinds) == {"interrupted", "late"}
    assert kinds["interrupted"].tokens == 15
    assert kinds["interrupted"].cost_usd == 0.015


async def test_a_cancelled_wait_that_is_retried_pays_for_its_answer_once(opened: Opened) -> None:
    """MSG-18, CKPT-16: the journal is kept, and its entry of the ledger taken back."""
    async with opened(*ONE, tools=(render,)) as (desk, hands, run_id):
        await hands.step(run_id, 0)
        await desk.control.cancel(await desk.stored(run_id), "enough")
        stored = await desk.stored(run_id)
        revision = revise(stored.state, stored.log, {}, stored.state.info.updated_at)
        assert (await desk.control.retry(stored, revision)).word == "retried"
        report = await hands.step(run_id, 0)
        assert report.verdict is not None
        assert report.verdict.move is Move.WAIT
        assert (await hands.call(run_id, 0, 0)).applied
        await hands.finish(run_id)
        result = (await desk.stored(run_id)).result()
        assert (await desk.counters()).get("lost", 0) == 0
    assert result.success
    assert result.lost_attempts == ()
    assert len(requests(hands)) == 2


async def test_a_cancel_while_the_step_parks_answers_every_call(opened: Opened) -> None:
    """MSG-18: the park hears of it, and the step is committed instead."""
    script = (call(("look", {"what": "x"}), ("render", {"what": "a"})), say("never"))
    async with opened(say("x")) as (desk, _, _):

        @tool(name="look")
        async def cancels(what: str) -> str:
            """Cancel the run that runs it."""
            await desk.control.cancel(await desk.stored(current_invocation().run_id), "enough")
            return what

        agent = Agent("scripted", model=Script(script), tools=[cancels, render])
        desk.agent = agent
        run_id = await desk.create()
        hands = Hands(desk, agent)
        leases = hands.leases
        report = await hands.step(run_id, 0)
        assert report.applied
        assert len(leases) == 0
        stored = await desk.stored(run_id)
    assert stored.state.status.value == "cancelled"
    assert [one.error.code if one.error else None for one in stored.log[0].result.tool_calls] == [
        None,
        "NOT_EXECUTED",
    ]


async def test_a_paused_run_starts_no_call_keeps_results_and_goes_on_when_it_is_resumed(
    opened: Opened,
) -> None:
    """RUN-17: what runs may end; the clock of the wait stands still."""
    script = (call(("render", {"what": "a"}), ("measure", {"what": "b"})), say("done"))
    async with opened(*script, tools=(render, measure), parallel_tool_execution=True) as (
        desk,
        hands,
        run_id,
    ):
        await hands.step(run_id, 0)
        taken = await desk.steps.calls.take(ToolHint(run_id, 0, 0), "t")
        assert isinstance(taken, TakenCall)
        assert (await desk.control.pause(run_id)).word == "paused"
        refused = await hands.call(run_id, 0, 1)
        assert refused.refusal is not None
        assert refused.refusal.why is NotTaken.PAUSED
        assert (await desk.steps.calls.keep(taken.hint, "t", 0.1)).ours
        assert await desk.due(run_id) is None
        assert (await desk.steps.calls.deliver(taken, "s", result_of(taken), 0.1)).applied
        assert await desk.due(run_id) is None
        before = await desk.queued()
        assert (await desk.control.resume(await desk.stored(run_id))).word == "resumed"
        assert await desk.queued() == before
        assert (await desk.refused(run_id)).why is Refused.EARLY
        await desk.opened.connection.execute("DEL", HEAVY)
        assert await rescued(desk) == 1
        assert await messages(desk) == [[run_id, 0, 1]]
        assert (await hands.call(run_id, 0, 1)).applied
        await hands.finish(run_id)
        result = (await desk.stored(run_id)).result()
    assert [one.is_error for one in result.steps[0].tool_calls] == [False, False]


async def test_a_run_that_is_paused_when_its_last_result_comes_goes_on_at_its_step(
    opened: Opened,
) -> None:
    async with opened(*ONE, tools=(render,)) as (desk, hands, run_id):
        await hands.step(run_id, 0)
        taken = await desk.steps.calls.take(ToolHint(run_id, 0, 0), "t")
        assert isinstance(taken, TakenCall)
        await desk.control.pause(run_id)
        await desk.steps.calls.deliver(taken, "s", result_of(taken), 0.1)
        before = await desk.queued()
        await desk.control.resume(await desk.stored(run_id))
        assert await desk.queued() == before + 1
        await hands.finish(run_id)
        assert (await desk.stored(run_id)).result().success


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
        taken = await desk.steps.calls.take(ToolHint(run_id, 0, 0), "t")
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
        assert (await desk.header(run_id))["waiting"] == "0 0:gpu:render"
        with pytest.raises(Crash):
            await crashing_store(desk, "call-delivered").call(run_id, 0, 0)
        await hands.finish(run_id)
        result = (await desk.stored(run_id)).result()
    assert result.success
    assert result.lost_attempts == ()


async def test_a_wait_ends_with_the_runs_time_limit_and_the_call_is_answered(
    opened: Opened,
) -> None:
    """CONT-18, TIME-16: nobody serves the queue; the step is committed, its answer paid for."""
    async with opened(*ONE, tools=(render,), time_limit=0.3) as (desk, hands, run_id):
        await hands.step(run_id, 0)

        async def taken_up() -> bool:
            return (await hands.step(run_id, 0)).refusal is None

        await until(taken_up, within=30, what="the end of the wait")
        result = (await desk.stored(run_id)).result()
    error = result.steps[0].tool_calls[0].error
    assert error is not None
    assert "render" in error.message
    assert result.usage.total_tokens == 15
    assert result.status is not RunStatus.COMPLETED


async def test_a_result_that_comes_behind_the_end_of_its_run_lives_no_longer_than_that(
    opened: Opened,
) -> None:
    """DIST-05: its entry of the ledger is the first one, and expires with the run."""
    async with opened(*ONE, tools=(render,), time_limit=0.3) as (desk, hands, run_id):
        await hands.step(run_id, 0)
        calls = desk.steps.calls
        taken = await calls.take(ToolHint(run_id, 0, 0), "t")
        assert isinstance(taken, TakenCall)

        async def ended() -> bool:
            await hands.step(run_id, 0)
            return (await desk.stored(run_id)).state.status.is_terminal

        await until(ended, within=30, what="the end of the run")
        assert not (await calls.deliver(taken, "scripted", result_of(taken), 0.1)).applied
        assert await lost(desk, run_id) == ["late"]
        key = f"{desk.opened.keys.run(run_id)}:lost"
        assert await desk.opened.connection.execute("PTTL", key) > 0


async def test_a_cumulative_timeout_does_not_count_the_time_in_a_queue(opened: Opened) -> None:
    async with opened(*ONE, tools=(render,), cumulative_timeout=5.0) as (desk, hands, run_id):
        await hands.step(run_id, 0)
        refusal = await desk.refused(run_id)
    assert refusal.why is Refused.EARLY
    assert int(refusal.detail) > 6 * 24 * 3600 * 1000


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
        hands.call_leases.hand_back()
        assert (await making).record is None
        hold.set()
        await overdue(desk, run_id)
        assert await rescued(desk) == 1
        assert (await Hands(desk, hands.agent).call(run_id, 0, 0)).applied
        await hands.finish(run_id)
        result = (await desk.stored(run_id)).result()
    assert result.steps[0].tool_calls[0].result == "at last"
    assert [one.kind for one in result.lost_attempts] == ["interrupted"]


async def test_a_cancelled_runs_call_is_broken_off_by_its_next_renewal(opened: Opened) -> None:
    """DIST-09"""
    started = asyncio.Event()
    ended: list[str] = []

    @tool(queue=HEAVY)
    async def endless() -> str:
        """Run until it is told."""
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("told")
        raise AssertionError

    async with opened(call(("endless", {})), say("x"), tools=(endless,)) as (desk, hands, run_id):
        await hands.step(run_id, 0)
        making = asyncio.create_task(hands.call(run_id, 0, 0))
        await started.wait()
        await desk.control.cancel(await desk.stored(run_id), "enough")

        async def once(lease: CallLease) -> Kept:
            taken = lease.taken
            return await desk.steps.calls.keep(taken.hint, taken.token, lease.seconds)

        await hands.call_leases.renew(once)
        report = await asyncio.wait_for(making, 10)
        assert not report.applied
        assert ended == ["told"]
        assert await lost(desk, run_id) == ["interrupted", "late"]


async def test_a_worker_without_the_tool_leaves_the_call_to_others_unstarted(
    opened: Opened,
) -> None:
    async with opened(*ONE, tools=(render,)) as (desk, hands, run_id):
        await hands.step(run_id, 0)
        stranger = Hands(desk, Agent("other", model=Script((say("x"),))))
        refused = await stranger.call(run_id, 0, 0)
        assert refused.refusal is not None
        assert refused.refusal.why is NotTaken.UNREADABLE
        assert (await hands.call(run_id, 0, 0)).applied
        await hands.finish(run_id)
        result = (await desk.stored(run_id)).result()
    assert result.steps[0].tool_calls[0].repeated is False
    assert result.lost_attempts == ()


async def test_where_store_and_broker_differ_tasks_are_published_behind_the_script(
    redis_url: str,
) -> None:
    """DIST-15"""
    agent = Agent("scripted", model=Script(ONE), tools=(render,))
    async with bench(redis_url, agent, lease=0.5, grace=60, enqueue="publish") as desk:
        run_id, hands = await desk.create(), Hands(desk, agent)
        await hands.step(run_id, 0)
        assert await messages(desk) == [[run_id, 0, 0]]
        before = await desk.queued()
        await hands.call(run_id, 0, 0)
        assert await desk.queued() == before + 1
        await desk.opened.connection.execute("DEL", HEAVY)
        await hands.finish(run_id)
        assert (await desk.stored(run_id)).result().success


async def test_a_heavy_tool_reads_and_changes_the_runs_custom_state(opened: Opened) -> None:
    """STATE-06: as one in the step does."""

    @tool(queue=HEAVY)
    def count() -> StateUpdate:
        """Count up."""
        before = current_invocation().custom_state.get("count", 0)
        return StateUpdate(before + 1, {"count": before + 1})

    script = (call(("count", {})), call(("count", {})), say("done"))
    async with opened(*script, tools=(count,)) as (desk, hands, run_id):
        for step in (0, 1):
            await hands.step(run_id, step)
            await hands.call(run_id, step, 0)
            await hands.step(run_id, step)
        stored = await desk.stored(run_id)
    assert [step.result.tool_calls[0].result for step in stored.log] == [1, 2]
    assert stored.state.custom_state == {"count": 2}


async def test_an_inline_worker_makes_heavy_calls_itself(redis_url: str) -> None:
    """DIST-16"""
    agent = Agent("scripted", model=Script(ONE), tools=(render,))
    async with bench(redis_url, agent) as desk:
        run_id = await desk.create()
        async with InlineWorker(desk.opened.settings, [agent]) as worker:
            await asyncio.wait_for(worker.finish(run_id), 60)
        result = (await desk.stored(run_id)).result()
    assert result.success
    assert result.steps[0].tool_calls[0].result == "rendered a"


def result_of(taken: TakenCall) -> ToolCallRecord:
    """Return a good result of a taken call."""
    call_ = taken.call
    return ToolCallRecord(
        tool_name=call_.name, call_id=call_.id, result="r", timestamp=taken.now, duration_ms=100
    )


async def overdue(desk: Bench, run_id: str) -> None:
    """Make the run overdue for a look."""
    keys = desk.opened.keys
    await desk.opened.connection.execute("ZADD", keys.due(keys.shard_of(run_id)), 1, run_id)


async def rescued(desk: Bench) -> int:
    """Return how many hints one look of the rescuer published."""
    opened = desk.opened
    return await Rescuer(
        opened.connection,
        opened.keys,
        opened.dispatch,
        grace=60,
        interval=1.0,
        long_queue=1_000_000,
        jitter=lambda: 0.5,
    ).rescue()


def crashing_store(desk: Bench, point: str) -> Hands:
    """Return hands whose store ends them at a point behind its script."""

    def visit(name: str) -> None:
        if name == point:
            raise Crash(point)

    opened, terms = desk.opened, desk.steps.terms
    steps = StepStore(opened.connection, opened.keys, opened.configs, opened.dispatch, terms, visit)
    return Hands(replace(desk, steps=steps), desk.agent)
