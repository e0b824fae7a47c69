"""Tools with a queue of their own: the step parks, other workers deliver, the step goes on."""

import asyncio

import pytest
from support.runs.heavy_calls import HEAVY, ONE, journal, look, measure, messages, render
from support.runs.opened_runs import Opened
from support.runs.scripted_steps import Hands, Script, call, requests, say
from support.runs.stored_runs import bench
from support.runs.waits import awaited, let_pass, wait_of

from stepfleet.orchestrator import Agent, StateUpdate, StopReason, current_invocation, tool
from stepfleet.orchestrator.protocol.claim import Refused
from stepfleet.orchestrator.protocol.verdict import Move
from stepfleet.worker.runtime.inline import InlineWorker


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
        assert header["token"] == ""
        assert await awaited(desk, run_id) == ["0:gpu:render"]
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
        assert await awaited(desk, run_id) == ["0:gpu:render", "2:gpu:measure"]
        assert "r:1" in await journal(desk, run_id)
        assert (await hands.call(run_id, 0, 2)).applied
        assert await awaited(desk, run_id) == ["0:gpu:render"]
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


async def test_a_wait_ends_with_the_runs_time_limit_and_the_call_is_answered(
    opened: Opened,
) -> None:
    """CONT-17, TIME-16: nobody serves the queue; the step is committed, its answer paid for."""
    async with opened(*ONE, tools=(render,), time_limit=60) as (desk, hands, run_id):
        await hands.step(run_id, 0)
        header, key = await desk.header(run_id), desk.opened.keys.run(run_id)
        deadline = (await wait_of(desk, run_id))["deadline"]
        waits = deadline - int(header["execution_started"])
        assert 59_999 <= waits < 120_000  # the time that the park itself took is added
        assert (await desk.refused(run_id)).why is Refused.EARLY
        await desk.opened.connection.execute("HINCRBY", key, "execution_started", -61_000)
        await let_pass(desk, run_id, 61_000)  # a minute passes
        assert (await hands.step(run_id, 0)).applied
        result = (await desk.stored(run_id)).result()
    error = result.steps[0].tool_calls[0].error
    assert error is not None
    assert "render" in error.message
    assert result.usage.total_tokens == 15
    assert result.stop_reason is StopReason.TIME_LIMIT


async def test_a_cumulative_timeout_does_not_count_the_time_in_a_queue(opened: Opened) -> None:
    async with opened(*ONE, tools=(render,), cumulative_timeout=5.0) as (desk, hands, run_id):
        await hands.step(run_id, 0)
        refusal = await desk.refused(run_id)
    assert refusal.why is Refused.EARLY
    assert int(refusal.detail) > 6 * 24 * 3600 * 1000


async def test_a_worker_without_the_tool_leaves_the_call_to_others_unstarted(
    opened: Opened,
) -> None:
    async with opened(*ONE, tools=(render,)) as (desk, hands, run_id):
        await hands.step(run_id, 0)
        stranger = Hands(desk, Agent("other", model=Script((say("x"),))))
        refused = await stranger.call(run_id, 0, 0)
        assert refused.refusal is not None
        assert refused.refusal.why is Refused.UNREADABLE
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
