"""Runs that are cancelled or paused while a heavy tool works for them."""

import asyncio

from support.runs.conversations import check_pairs
from support.runs.heavy_calls import HEAVY, ONE, lost, measure, messages, render, rescued, result_of
from support.runs.opened_runs import Opened
from support.runs.scripted_steps import Hands, Script, call, requests, say

from stepfleet.orchestrator import Agent, StopReason, current_invocation, tool
from stepfleet.orchestrator.protocol.claim import Held, Refused, Work
from stepfleet.orchestrator.protocol.revision import revise
from stepfleet.orchestrator.protocol.verdict import Move
from stepfleet.orchestrator.protocol.waiting import TakenCall
from stepfleet.worker.leases.lease import Lease


async def test_a_cancel_ends_a_waiting_run_at_once_and_its_late_result_is_listed(
    opened: Opened,
) -> None:
    """DIST-09: the answer that was paid for is listed with its price, for as long as its run."""
    async with opened(*ONE, tools=(render,)) as (desk, hands, _):
        run_id = await desk.create(batch="")
        await hands.step(run_id, 0)
        taken = await desk.steps.calls.take(Work(run_id, 0, 0), "t")
        assert isinstance(taken, TakenCall)
        answer = await desk.control.cancel(await desk.stored(run_id), "enough")
        assert (answer.outcome, answer.in_hands) == ("cancelled", True)
        assert not (await desk.steps.calls.keep(taken.hint, "t", 0.1)).ours
        late = await desk.steps.calls.deliver(taken, "scripted", result_of(taken), 0.1)
        assert (late.applied, late.status) == (False, "cancelled")
        result = (await desk.stored(run_id)).result()
        await desk.keep_up()
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
    """MSG-18: the journal is kept, and its entry of the ledger taken back."""
    async with opened(*ONE, tools=(render,)) as (desk, hands, run_id):
        await hands.step(run_id, 0)
        await desk.control.cancel(await desk.stored(run_id), "enough")
        stored = await desk.stored(run_id)
        revision = revise(stored.state, stored.log, {}, stored.state.info.updated_at)
        assert (await desk.control.retry(stored, revision)).outcome == "retried"
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
    check_pairs(requests(hands)[1].messages)


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
    check_pairs(stored.state.messages)


async def test_a_paused_run_starts_no_call_keeps_results_and_goes_on_when_it_is_resumed(
    opened: Opened,
) -> None:
    """CKPT-11: what runs may end; the clock of the wait stands still."""
    script = (call(("render", {"what": "a"}), ("measure", {"what": "b"})), say("done"))
    async with opened(*script, tools=(render, measure), parallel_tool_execution=True) as (
        desk,
        hands,
        run_id,
    ):
        await hands.step(run_id, 0)
        taken = await desk.steps.calls.take(Work(run_id, 0, 0), "t")
        assert isinstance(taken, TakenCall)
        assert (await desk.control.pause(run_id)).outcome == "paused"
        refused = await hands.call(run_id, 0, 1)
        assert refused.refusal is not None
        assert refused.refusal.why is Refused.PAUSED
        assert (await desk.steps.calls.keep(taken.hint, "t", 0.1)).ours
        assert await desk.due(run_id) is None
        assert (await desk.steps.calls.deliver(taken, "s", result_of(taken), 0.1)).applied
        assert await desk.due(run_id) is None
        before = await desk.queued()
        assert (await desk.control.resume(await desk.stored(run_id))).outcome == "resumed"
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
        taken = await desk.steps.calls.take(Work(run_id, 0, 0), "t")
        assert isinstance(taken, TakenCall)
        await desk.control.pause(run_id)
        await desk.steps.calls.deliver(taken, "s", result_of(taken), 0.1)
        before = await desk.queued()
        await desk.control.resume(await desk.stored(run_id))
        assert await desk.queued() == before + 1
        await hands.finish(run_id)
        assert (await desk.stored(run_id)).result().success


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

        async def once(lease: Lease) -> Held:
            taken = lease.work
            assert isinstance(taken, TakenCall)
            return await desk.steps.calls.keep(taken.hint, taken.token, lease.seconds)

        await hands.leases.renew(once)
        report = await asyncio.wait_for(making, 60)
        assert not report.applied
        assert ended == ["told"]
        assert await lost(desk, run_id) == ["interrupted", "late"]
