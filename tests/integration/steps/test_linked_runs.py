"""Calls that wait for another run, or for a person: answered once, and settled after every end."""

from dataclasses import replace

import pytest
from support.runs.heavy_calls import journal, messages
from support.runs.linked_calls import (
    ASK,
    MELT,
    MIXED,
    RESEARCH,
    ask,
    key_of,
    melt,
    research,
    retry,
    start,
)
from support.runs.opened_runs import Opened
from support.runs.stored_runs import Bench, answered, bench, plain_agent
from support.runs.waits import let_pass

from stepfleet.orchestrator.protocol.attempt import Interrupted, Interruption, Span
from stepfleet.orchestrator.protocol.claim import Refused, Want, Work
from stepfleet.orchestrator.protocol.revision import revise
from stepfleet.orchestrator.protocol.verdict import Move
from stepfleet.orchestrator.protocol.waiting import TakenCall
from stepfleet.orchestrator.records.calls.answers import Answer, Decision, RunEnd
from stepfleet.orchestrator.store.runs.control import PAUSED_BY
from stepfleet.worker.runtime.links import LinkedRuns

YES = Answer(decision=Decision(approved=True, by="ada", text="forty-two"))
NO = Answer(decision=Decision(approved=False, by="bob", reason="too dear"))


async def asks(desk: Bench, run_id: str) -> list[str]:
    """Return what is in the index of questions to people."""
    key = desk.opened.keys.tag(desk.opened.keys.shard_of(run_id)) + "asks"
    return list(await desk.opened.connection.execute("ZRANGE", key, 0, -1))


async def test_a_question_waits_in_the_index_and_the_first_answer_counts(opened: Opened) -> None:
    async with opened(*ASK, tools=(ask,)) as (desk, hands, run_id):
        before = await desk.queued()
        report = await hands.step(run_id, 0)
        assert report.verdict is not None
        assert report.verdict.move is Move.WAIT
        assert len(hands.leases) == 0
        assert await asks(desk, run_id) == [f"0 0 {run_id}"]
        assert await desk.queued() == before  # no message: nothing is to be done before the answer
        assert (await desk.refused(run_id)).why is Refused.EARLY
        hint, key = Work(run_id, 0, 0), await key_of(desk, run_id, 0)
        answer = desk.steps.calls.answer
        other = await answer(hint, f"{key}x", YES)
        assert (other.applied, other.first, other.status) == (False, "", "in_progress")
        assert await asks(desk, run_id) == [f"0 0 {run_id}"]  # it waits still
        first = await answer(hint, key, YES)
        assert (first.applied, first.left) == (True, 0)
        again = await answer(hint, key, NO)
        assert not again.applied
        assert Answer.from_json(again.first) == YES
        assert await asks(desk, run_id) == []
        await hands.finish(run_id)
        late = await answer(hint, key, NO)
        assert (late.applied, late.status) == (False, "completed")
        result = (await desk.stored(run_id)).result()
    assert result.steps[0].tool_calls[0].result == "forty-two"


async def test_an_answer_during_a_pause_is_kept(opened: Opened) -> None:
    async with opened(*ASK, tools=(ask,)) as (desk, hands, run_id):
        await hands.step(run_id, 0)
        key = await key_of(desk, run_id, 0)
        await desk.control.pause(run_id)
        done = await desk.steps.calls.answer(Work(run_id, 0, 0), key, NO)
        assert (done.applied, done.status) == (True, "paused")
        assert await desk.due(run_id) is None
        await desk.control.resume(await desk.stored(run_id))
        await hands.finish(run_id)
        record = (await desk.stored(run_id)).result().steps[0].tool_calls[0]
    assert record.error is not None
    assert (record.error.code, record.error.message) == ("DENIED", "denied by bob: too dear")


async def test_an_approved_call_goes_to_its_tools_queue_at_once(opened: Opened) -> None:
    async with opened(*MELT, tools=(melt,)) as (desk, hands, run_id):
        await hands.step(run_id, 0)
        assert await asks(desk, run_id) == [f"0 0 {run_id}"]
        hint, yes = Work(run_id, 0, 0), Answer(decision=Decision(approved=True, by="ada"))
        await desk.steps.calls.answer(hint, await key_of(desk, run_id, 0), yes)
        assert await messages(desk) == []
        await hands.step(run_id, 0)
        assert await messages(desk) == [[run_id, 0, 0]]


async def test_calls_of_a_cancelled_run_wait_for_nobody(opened: Opened) -> None:
    async with opened(*ASK, tools=(ask,)) as (desk, hands, run_id):
        await hands.step(run_id, 0)
        waiting = desk.opened.approvals
        assert len((await waiting.page(5, None))[0]) == 1
        await desk.control.cancel_unread(run_id, "no more")
        assert await asks(desk, run_id) == []  # metrics and alerts count what is in the index
        assert await waiting.page(5, None) == ([], None)
        assert await waiting.of_run(run_id) == []


async def test_calls_for_runs_join_once_and_are_dispatched_at_once(opened: Opened) -> None:
    async with opened(*RESEARCH, tools=(research,), parallel_tool_execution=True) as (
        desk,
        hands,
        run_id,
    ):
        before = await desk.queued()
        await hands.step(run_id, 0)
        assert await desk.queued() == before + 2
        end = RunEnd(run_id="child", agent="researcher", status="completed", output="found", cut=3)
        hints = [Work(run_id, 0, index) for index in range(2)]
        keys = [await key_of(desk, run_id, index) for index in range(2)]
        assert keys[0] != keys[1]
        answer = desk.steps.calls.answer
        assert (await answer(hints[1], keys[1], Answer(run=end))).left == 1
        assert (await desk.refused(run_id)).why is Refused.EARLY
        failed = end.model_copy(update={"status": "error", "stop_reason": "error", "error": "no"})
        assert (await answer(hints[0], keys[0], Answer(run=failed))).left == 0
        await hands.finish(run_id)
        records = (await desk.stored(run_id)).result().steps[0].tool_calls
    assert records[0].error is not None
    assert records[0].error.code == "RUN_FAILED"
    assert records[1].result == "found\n[3 more characters: see run child]"


async def test_a_retried_run_asks_again_for_what_did_not_complete(opened: Opened) -> None:
    """It was cancelled before it read its answers: those of completed runs alone are kept."""
    async with opened(*RESEARCH, tools=(research,), parallel_tool_execution=True) as (
        desk,
        hands,
        run_id,
    ):
        await hands.step(run_id, 0)
        for index, status in enumerate(("completed", "cancelled")):
            end = RunEnd(run_id="child", agent="researcher", status=status, output='"status"')
            key = await key_of(desk, run_id, index)
            await desk.steps.calls.answer(Work(run_id, 0, index), key, Answer(run=end))
        await desk.control.cancel_unread(run_id, "by mistake")
        await retry(desk, run_id)
        kept = await journal(desk, run_id)
        assert ("a:0" in kept, "a:1" in kept) == (True, False)
        report = await hands.step(run_id, 0)
        assert report.verdict is not None
        assert report.verdict.move is Move.WAIT
        links = desk.opened.links
        assert await links.awaited(run_id) == (kept["k:1"],)


@pytest.mark.parametrize("goes_on", [True, False])
async def test_a_run_that_ended_with_its_caller_goes_on_with_it(
    opened: Opened, goes_on: bool
) -> None:
    """The caller was retried before the end, that of the cancel, had reached it."""
    async with opened(*RESEARCH, tools=(research,), parallel_tool_execution=True) as (
        desk,
        hands,
        run_id,
    ):
        linked = LinkedRuns(desk.opened)
        await hands.step(run_id, 0)
        child = await start(desk, run_id, 1)
        await desk.control.cancel_unread(run_id, "by mistake")
        await linked.cancel(child, run_id)  # by a worker that dies behind it
        assert (await desk.header(child))["status"] == "cancelled"
        if goes_on:
            await retry(desk, run_id)
            await hands.step(run_id, 0)
        await linked.settle(child)
        header = await desk.header(child)
        assert header["status"] == ("in_progress" if goes_on else "cancelled")
        assert header["returns"] == ("1" if goes_on else "")
        assert "a:1" not in await journal(desk, run_id)
        if goes_on:
            await desk.control.cancel_unread(child, "not this one")
            await linked.settle(child)
            answer = Answer.from_json((await journal(desk, run_id))["a:1"])
            assert answer.run is not None
            assert answer.run.status == "cancelled"


async def test_a_tree_has_the_runs_of_an_open_step_that_have_ended(opened: Opened) -> None:
    async with opened(*MIXED, tools=(research, ask), parallel_tool_execution=True) as (
        desk,
        hands,
        run_id,
    ):
        linked = LinkedRuns(desk.opened)
        await hands.step(run_id, 0)
        children = [await start(desk, run_id, index) for index in (0, 2)]
        await desk.control.cancel_unread(children[0], "not this one")
        await linked.settle(children[0])
        trees = desk.opened.lists
        tree = await trees.tree(run_id, 200)
        assert [one.run.run_id for one in tree.below] == children
        assert tree.left_out == 0
        small = await trees.tree(run_id, 1)
        assert ([one.run.run_id for one in small.below], small.left_out) == (children[:1], 1)


@pytest.mark.parametrize("how", ["completed", "cancelled"])
async def test_an_ended_run_stays_due_until_its_followers_know(how: str, redis_url: str) -> None:
    async with bench(redis_url, plain_agent(), lease=600, grace=60) as desk:
        waits = Work("some other run", 3, 1)
        run_id = await desk.create(returns_to=waits)
        links = desk.opened.links
        second = Work("another", 0, 0)
        assert await links.follow(run_id, second) is None
        assert (await links.owed(run_id)).calls == ()  # it has not ended
        if how == "completed":
            claim = await desk.claim(run_id)
            done = await desk.commit(claim, answered(claim, "fine"))
            assert done.owes
        else:
            await desk.control.cancel_unread(run_id, "no more")
        assert await desk.due(run_id) is not None
        refusal = await desk.refused(run_id)
        assert (refusal.why, refusal.owes) == (Refused.ENDED, True)
        owed = await links.owed(run_id)
        assert set(owed.calls) == {waits, second}
        assert await links.settled(run_id, replace(owed, calls=(second,))) == 1
        assert await desk.due(run_id) is not None
        assert await links.settled(run_id, replace(owed, calls=(waits,))) == 0
        assert await desk.due(run_id) is None
        assert not (await desk.refused(run_id)).owes
        status = await links.follow(run_id, second)
        assert status is not None
        assert status.is_terminal


async def test_a_request_to_a_waiting_run_reaches_the_runs_it_has_started(opened: Opened) -> None:
    async with opened(*RESEARCH, tools=(research,), parallel_tool_execution=True) as (
        desk,
        hands,
        run_id,
    ):
        links = desk.opened.links
        await hands.step(run_id, 0)
        keys = {await key_of(desk, run_id, index) for index in range(2)}
        await desk.control.pause(run_id)
        assert (await desk.refused(run_id)).owes
        owed = await links.owed(run_id)
        assert (owed.request, set(owed.runs)) == (Want.PAUSE, keys)
        await links.settled(run_id, owed)
        assert await desk.due(run_id) is None
        await desk.control.resume(await desk.stored(run_id))
        await desk.control.pause(run_id)
        await desk.control.resume(await desk.stored(run_id))
        assert (await links.owed(run_id)).request is None
        await desk.control.cancel_unread(run_id, "no more")
        owed = await links.owed(run_id)
        assert (owed.request, set(owed.runs)) == (Want.CANCEL, keys)
        await links.settled(run_id, owed)
        assert await desk.due(run_id) is None


async def test_a_held_run_that_is_cancelled_reaches_the_runs_it_waits_for(opened: Opened) -> None:
    """Its patience is over, so a worker holds its step again."""
    async with opened(*RESEARCH, tools=(research,), parallel_tool_execution=True) as (
        desk,
        hands,
        run_id,
    ):
        links = desk.opened.links
        await hands.step(run_id, 0)
        keys = {await key_of(desk, run_id, index) for index in range(2)}
        await let_pass(desk, run_id)
        claim = await desk.claim(run_id)
        await desk.control.cancel_unread(run_id, "no more")
        claim = await desk.claim(run_id, token=claim.token)
        span = Span(claim.now, 0.1)
        committed = await desk.commit(claim, Interrupted(span, Interruption.CANCELLED))
        assert committed.status == "cancelled"
        owed = await links.owed(run_id)
    assert (owed.request, set(owed.runs)) == (Want.CANCEL, keys)


async def test_who_looked_after_an_approved_call_does_not_put_it_off(opened: Opened) -> None:
    async with opened(*MELT, tools=(melt,)) as (desk, hands, run_id):
        await hands.step(run_id, 0)
        hint, yes = Work(run_id, 0, 0), Answer(decision=Decision(approved=True, by="ada"))
        calls = desk.steps.calls
        assert isinstance(await calls.take(hint, "attendant"), TakenCall)  # its time limit is over
        await calls.answer(hint, await key_of(desk, run_id, 0), yes)
        await calls.leave(hint, "attendant", delay=3600, started=False)
        await hands.step(run_id, 0)
        assert await messages(desk) == [[run_id, 0, 0]]
        taken = await calls.take(hint, "worker of the queue")
        assert isinstance(taken, TakenCall)
        assert (taken.attempt, taken.crashes) == (1, 0)


async def test_a_run_that_went_on_is_not_settled_for_its_end_before(redis_url: str) -> None:
    async with bench(redis_url, plain_agent(), lease=600, grace=60) as desk:
        waits = Work("some other run", 3, 1)
        run_id = await desk.create(batch="", returns_to=waits)
        links = desk.opened.links
        await desk.control.cancel_unread(run_id, "no more")
        owed = await links.owed(run_id)  # a worker tells its caller, and stalls
        stored = await desk.stored(run_id)
        await desk.control.retry(
            stored, revise(stored.state, stored.log, stored.overrides, stored.state.info.updated_at)
        )
        followers = f"{desk.opened.keys.run(run_id)}:returns"
        assert await desk.opened.connection.execute("PTTL", followers) == -1
        assert await links.follow(run_id, waits) is None
        assert await links.settled(run_id, owed) == 1
        await desk.control.cancel_unread(run_id, "no more")
        owed = await links.owed(run_id)
        assert owed.calls == (waits,)
        assert await links.settled(run_id, owed) == 0
        assert await desk.due(run_id) is None


async def test_a_run_that_is_paused_with_another_one_says_so_until_it_goes_on(
    redis_url: str,
) -> None:
    async with bench(redis_url, plain_agent(), lease=600, grace=60) as desk:
        run_id = await desk.create()

        async def paused_by() -> str | None:
            return (await desk.stored(run_id)).header.get(PAUSED_BY)

        async def resume() -> None:
            await desk.control.resume(await desk.stored(run_id))
            assert await paused_by() is None

        await desk.control.pause(run_id, paused_with="its caller")
        await desk.control.pause(run_id)  # it rests already: that changes nothing
        assert await paused_by() == "its caller"
        await resume()
        await desk.control.pause(run_id)
        await desk.control.pause(run_id, paused_with="its caller")
        assert await paused_by() is None
        await resume()
        await desk.control.pause(run_id, paused_with="its caller")
        await desk.control.cancel_unread(run_id, "no more")
        stored = await desk.stored(run_id)
        await desk.control.retry(
            stored, revise(stored.state, stored.log, stored.overrides, stored.state.info.updated_at)
        )
        await desk.control.pause(run_id)
        assert await paused_by() is None
        await resume()
        await desk.claim(run_id)
        await desk.control.pause(
            run_id, paused_with="its caller"
        )  # a worker holds it: it will rest
        await desk.control.pause(run_id)
        assert await paused_by() == "its caller"
        await resume()
