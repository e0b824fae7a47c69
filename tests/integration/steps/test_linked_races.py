"""Runs that wait for others while several act at once: nothing is lost, nobody goes on alone."""

import asyncio
from dataclasses import replace

import pytest
from support.deadlines import until
from support.runs.heavy_calls import HEAVY, ONE, journal, messages, render, rescued, rescuer_of
from support.runs.linked_calls import ASK, MELT, RESEARCH, ask, melt, research, retry, start
from support.runs.opened_runs import Opened
from support.runs.scripted_steps import Hands
from support.runs.stored_runs import Bench, answered, bench, failed, plain_agent, with_settings
from support.runs.waits import let_pass

from stepfleet.orchestrator import AsyncFleet, Message
from stepfleet.orchestrator.protocol.attempt import Interruption
from stepfleet.orchestrator.protocol.claim import Refused, Work
from stepfleet.orchestrator.protocol.waiting import TakenCall
from stepfleet.orchestrator.records.calls.answers import Answer, Decision, RunEnd
from stepfleet.orchestrator.store.runs.control import Purge
from stepfleet.orchestrator.store.runs.submission import NewRun
from stepfleet.worker.leases.lease import Lease
from stepfleet.worker.runtime.attending import ChildRuns
from stepfleet.worker.runtime.links import LinkedRuns
from stepfleet.worker.step import run_work

CALLS = {"tools": (research,), "parallel_tool_execution": True}
FIRST = 0


def linked(desk: Bench) -> LinkedRuns:
    return LinkedRuns(desk.opened)


def children(desk: Bench) -> ChildRuns:
    return ChildRuns(desk.opened)


async def taken(desk: Bench, run_id: str, by: str = "attendant") -> TakenCall:
    """Take the first call, to look after it."""
    call = await desk.steps.calls.take(Work(run_id, 0, FIRST), by)
    assert isinstance(call, TakenCall), call
    return call


async def look(desk: Bench, hands: Hands, call: TakenCall) -> float:
    """Look after a call whose run is there; its agent's code is not needed."""
    return await children(desk).attend(call, hands.ports().agent(call.config))


async def patience_ends(desk: Bench, run_id: str) -> None:
    """Let the run's patience have ended: its next claim goes on without the answers."""
    await let_pass(desk, run_id)


async def status(desk: Bench, run_id: str) -> str:
    return (await desk.header(run_id))["status"]


async def seconds_to_look(desk: Bench, run_id: str) -> float:
    """Return in how many seconds the first call is looked at."""
    at = float((await journal(desk, run_id))[f"n:{FIRST}"])
    return at / 1000 - (await desk.opened.connection.now()).timestamp()


async def purged(desk: Bench) -> int:
    """Purge all that has ended, once; return how many went."""
    purging = with_settings(desk.opened, retention=60).purging
    return [done async for done in purging.purge(Purge())][-1]


async def test_a_resume_takes_back_a_pause_that_a_held_run_below_has_not_reached(
    opened: Opened,
) -> None:
    """MULTI-07"""
    async with opened(*RESEARCH, **CALLS) as (desk, hands, run_id):
        await hands.step(run_id, 0)
        child = await start(desk, run_id, FIRST)
        claim = await desk.claim(child)
        await desk.control.pause(run_id)
        await linked(desk).settle(run_id)
        assert (await desk.header(child))["want"] == "pause"
        await desk.control.resume(await desk.stored(run_id))
        await look(desk, hands, await taken(desk, run_id))
        assert (await desk.header(child))["want"] == ""
        await desk.commit(claim, answered(claim, "fine"))
        assert await status(desk, child) == "completed"


@pytest.mark.parametrize("settled_late", [False, True])
async def test_an_attendant_does_not_put_off_the_look_behind_a_resume(
    settled_late: bool, opened: Opened
) -> None:
    """MULTI-07: it has seen the run below before that was paused, and stalls within its lease."""
    async with opened(*RESEARCH, **CALLS) as (desk, hands, run_id):
        links = desk.opened.links
        await hands.step(run_id, 0)
        child = await start(desk, run_id, FIRST)
        owed = await links.owed(run_id)
        if settled_late:
            await desk.control.pause(run_id)
            owed = await links.owed(run_id)
            await desk.control.resume(await desk.stored(run_id))
        call = await taken(desk, run_id)
        delay = await look(desk, hands, call)
        if settled_late:
            await linked(desk).pause(child, run_id)
            await links.settled(run_id, owed)
        else:
            await desk.control.pause(run_id)
            await linked(desk).settle(run_id)
            await desk.control.resume(await desk.stored(run_id))
        assert await status(desk, child) == "paused"
        await desk.steps.calls.leave(call.hint, call.token, delay=delay, started=False)
        assert await seconds_to_look(desk, run_id) < 1
        await look(desk, hands, await taken(desk, run_id, "another"))
        assert await status(desk, child) == "queued"


async def test_a_run_below_is_not_retried_while_its_caller_stops_waiting(opened: Opened) -> None:
    """MULTI-07, CONT-17: another worker settles its end before the caller has gone on."""
    async with opened(*RESEARCH, **CALLS) as (desk, hands, run_id):
        await hands.step(run_id, 0)
        below = [await start(desk, run_id, index) for index in (0, 1)]
        await patience_ends(desk, run_id)

        async def stop(child: str, caller: str) -> RunEnd | None:
            end = await linked(desk).stop(child, caller)
            await linked(desk).settle(child)
            return end

        ports = hands.ports()
        with ports.pacing:
            await run_work(Work(run_id, 0), replace(ports, stop_run=stop), hands.leases)
        assert [await status(desk, one) for one in below] == ["cancelled", "cancelled"]
        assert int((await desk.header(run_id))["step"]) == 1


async def test_a_cancel_while_runs_below_are_stopped_reaches_the_others(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MULTI-07: the step is logged, and its journal gone."""
    async with opened(*RESEARCH, **CALLS) as (desk, hands, run_id):
        await hands.step(run_id, 0)
        below = [await start(desk, run_id, index) for index in (0, 1)]
        await patience_ends(desk, run_id)

        async def stop(child: str, caller: str) -> RunEnd | None:
            await linked(desk).stop(child, caller)
            await desk.control.cancel_unread(run_id, "no more")
            raise asyncio.CancelledError

        # As a lease that knows of the cancel.
        monkeypatch.setattr(Lease, "interrupted_by", lambda *_: Interruption.CANCELLED)
        ports = hands.ports()
        with ports.pacing:
            report = await run_work(Work(run_id, 0), replace(ports, stop_run=stop), hands.leases)
        assert await status(desk, run_id) == "cancelled"
        assert report.owes
        assert "queued" in [await status(desk, one) for one in below]
        await linked(desk).settle(run_id)
        assert [await status(desk, one) for one in below] == ["cancelled", "cancelled"]
        assert await desk.due(run_id) is None
        assert "orphans" not in await desk.header(run_id)


async def test_a_cancel_waits_for_a_run_below_that_is_just_being_started(opened: Opened) -> None:
    """MULTI-07: the worker that starts it may die behind that."""
    async with opened(*RESEARCH, **CALLS) as (desk, hands, run_id):
        await hands.step(run_id, 0)
        await taken(desk, run_id)
        await desk.control.cancel_unread(run_id, "no more")
        await linked(desk).settle(run_id)
        assert (await desk.header(run_id))["reach"] == "cancel"
        assert await desk.due(run_id) is not None
        child = await start(desk, run_id, FIRST)
        await linked(desk).settle(run_id)
        assert await status(desk, child) == "cancelled"
        assert await desk.due(run_id) is None


async def test_the_end_of_a_callers_time_waits_for_a_run_below_that_is_just_being_started(
    opened: Opened,
) -> None:
    """MULTI-07: its step is logged, and so its journal gone."""
    async with opened(*RESEARCH, **CALLS) as (desk, hands, run_id):
        await hands.step(run_id, 0)
        await taken(desk, run_id)
        await patience_ends(desk, run_id)
        ports = hands.ports()
        with ports.pacing:
            await run_work(
                Work(run_id, 0), replace(ports, stop_run=linked(desk).stop), hands.leases
            )
        await desk.control.cancel_unread(run_id, "no more")
        if await status(desk, run_id) == "in_progress":
            pytest.fail("the caller goes on")
        await linked(desk).settle(run_id)
        assert (await desk.header(run_id))["reach"] == "cancel"
        key = f"{desk.opened.keys.run(run_id)}"
        child = (await desk.opened.connection.execute("HGET", key, "orphans")).split()[1]
        run = NewRun(
            run_id=child,
            agent=desk.agent.name,
            config=await desk.opened.configs.save(desk.agent.config),
            messages=(Message.user("look"),),
            max_steps=desk.agent.config.max_steps,
            parent=run_id,
        )
        assert await desk.submission.create(run)
        await linked(desk).settle(run_id)
        assert await status(desk, child) == "cancelled"


async def test_a_run_that_is_started_for_a_caller_which_has_gone_on_ends(opened: Opened) -> None:
    """MULTI-07"""
    async with opened(*RESEARCH, **CALLS) as (desk, hands, run_id):
        await hands.step(run_id, 0)
        call = await taken(desk, run_id)
        await patience_ends(desk, run_id)
        await desk.claim(run_id)
        child = await start(desk, run_id, FIRST)
        await look(desk, hands, call)
        assert await status(desk, child) == "cancelled"


async def test_a_run_goes_when_those_that_wait_for_its_end_know_of_it(
    fleet: AsyncFleet, redis_url: str
) -> None:
    """MULTI-04: also one that was cancelled, and whose cancel is to reach others."""
    agent = plain_agent()
    async with bench(redis_url, agent, lease=600, grace=60) as desk:
        first = await fleet.submit(agent, "a")
        second = await fleet.submit(agent, "{output}", after=first)
        await linked(desk).dependents.attend(second)
        claim = await desk.claim(first)
        assert (await desk.commit(claim, answered(claim, "fine"))).owes
        assert await purged(desk) == 0
        await linked(desk).settle(first)
        assert await desk.due(second) is not None
        await linked(desk).dependents.attend(second)
        assert await purged(desk) == 1
        assert await desk.header(first) == {}
        assert (await desk.claim(second)).state.messages[-1].text == "fine"


async def test_a_purge_waits_until_runs_that_owe_their_end_may_go(opened: Opened) -> None:
    async with opened(*RESEARCH, **CALLS) as (desk, hands, run_id):
        await hands.step(run_id, 0)
        child = await start(desk, run_id, FIRST)
        await desk.control.cancel_unread(run_id, "no more")
        # A client's clock may be some milliseconds behind.
        await desk.opened.connection.execute("HSET", desk.opened.keys.run(run_id), "ended", 1)
        counts: list[int] = []
        purging = with_settings(desk.opened, retention=60).purging
        async for done in purging.purge(Purge()):
            if done == 0 and not counts:
                await linked(desk).settle(run_id)
            counts.append(done)
        assert counts[-1] >= 1
        assert await desk.header(run_id) == {}
        assert await status(desk, child) == "cancelled"


async def test_a_tool_call_of_a_queue_is_not_taken_while_the_fleet_is_paused(
    opened: Opened, fleet: AsyncFleet
) -> None:
    async with opened(*ONE, tools=(render,)) as (desk, hands, run_id):
        await hands.step(run_id, 0)
        await fleet.pause()
        report = await hands.call(run_id, 0, 0)
        assert report.refusal is not None
        assert report.refusal.why is Refused.PAUSED
        await fleet.resume()
        await messages_are_gone(desk)
        assert await rescued(desk) == 1
        assert len(await messages(desk)) == 1
        assert (await hands.call(run_id, 0, 0)).applied


async def messages_are_gone(desk: Bench) -> None:
    await desk.opened.connection.execute("DEL", HEAVY)


async def test_a_cancel_reaches_runs_below_while_the_fleet_is_paused(
    opened: Opened, fleet: AsyncFleet
) -> None:
    """MULTI-07"""
    async with opened(*RESEARCH, **CALLS) as (desk, hands, run_id):
        await hands.step(run_id, 0)
        child = await start(desk, run_id, FIRST)
        await fleet.pause()
        await desk.control.cancel_unread(run_id, "no more")
        await settled_by_the_rescuer(desk, run_id)
        assert await status(desk, child) == "cancelled"


async def test_what_a_run_owes_needs_no_slot(opened: Opened) -> None:
    """MULTI-07: the slots may be taken by the runs that are to be cancelled."""
    async with opened(*RESEARCH, **CALLS) as (desk, hands, run_id):
        await hands.step(run_id, 0)
        child = await start(desk, run_id, FIRST)
        waiting = await desk.opened.dispatch.waiting()
        await desk.control.cancel_unread(run_id, "no more")
        await settled_by_the_rescuer(desk, run_id)
        assert await status(desk, child) == "cancelled"
        assert await desk.opened.dispatch.waiting() == waiting


async def settled_by_the_rescuer(desk: Bench, run_id: str) -> None:
    """Have a rescuer look, and wait until nothing is owed."""
    rescuer = rescuer_of(desk)
    rescuer.settle = linked(desk).settle
    assert await rescuer.rescue() == 1

    async def is_settled() -> bool:
        return await desk.due(run_id) is None

    await until(is_settled)


async def test_a_cancel_goes_down_all_levels_at_once(opened: Opened) -> None:
    """MULTI-07: those in between, which nobody holds, are settled with it."""
    async with opened(*RESEARCH, **CALLS) as (desk, hands, run_id):
        await hands.step(run_id, 0)
        child = await start(desk, run_id, FIRST)
        await hands.step(child, 0)
        grandchild = await start(desk, child, FIRST)
        for word in ("pause", "cancel"):
            if word == "pause":
                await desk.control.pause(run_id)
            else:
                await desk.control.cancel_unread(run_id, "no more")
            await linked(desk).settle(run_id)
            ends = "paused" if word == "pause" else "cancelled"
            assert [await status(desk, one) for one in (child, grandchild)] == [ends, ends]
            if word == "pause":
                await desk.control.resume(await desk.stored(run_id))


async def test_a_run_below_that_another_one_retries_answers_with_its_new_end(
    opened: Opened,
) -> None:
    async with opened(*RESEARCH, **CALLS) as (desk, hands, run_id):
        await hands.step(run_id, 0)
        child = await start(desk, run_id, FIRST)
        await desk.control.cancel_unread(run_id, "by mistake")
        await desk.opened.connection.execute("HDEL", desk.opened.keys.run(run_id), "reach")
        claim = await desk.claim(child)
        await desk.commit(claim, failed(claim))
        await linked(desk).settle(child)
        await retry(desk, run_id)
        await hands.step(run_id, 0)
        kids = children(desk)
        real = kids.linked.control.retry

        async def late(one: str, changes: dict[str, object]) -> object:
            await real(one, {})  # somebody else, whose worker is quick
            step = int((await desk.header(child))["step"])
            claim = await desk.claim(child, step=step)
            await desk.commit(claim, answered(claim, "good"))
            return await real(one, changes)

        kids.linked.control.retry = late  # type: ignore[method-assign,assignment]
        call = await taken(desk, run_id)
        await kids.attend(call, hands.ports().agent(call.config))
        answer = Answer.from_json((await journal(desk, run_id))[f"a:{FIRST}"])
        assert answer.run is not None
        assert (answer.run.status, answer.run.output) == ("completed", "good")


async def test_nobody_decides_behind_a_time_limit_that_no_worker_has_noticed(
    opened: Opened,
) -> None:
    async with opened(*ASK, tools=(ask,)) as (desk, hands, run_id):
        await hands.step(run_id, 0)
        asks = desk.opened.approvals
        (one,) = await asks.of_run(run_id)
        decision = Decision(approved=True, text="42", by="ada", at=one.ask.since)
        key = f"{desk.opened.keys.run(run_id)}:journal"
        till = await desk.opened.connection.execute("HGET", key, "t:0")
        await desk.opened.connection.execute("HSET", key, "t:0", 1)
        assert not (await asks.decide(one, decision)).applied
        await desk.opened.connection.execute("HSET", key, "t:0", till)
        await patience_ends(desk, run_id)
        assert not (await asks.decide(one, decision)).applied
        assert "a:0" not in await journal(desk, run_id)


async def test_an_approved_call_of_a_queue_is_not_started_behind_the_runs_time(
    opened: Opened,
) -> None:
    """Nobody would learn what has come of it."""
    async with opened(*MELT, tools=(melt,), time_limit=5.0) as (desk, hands, run_id):
        await hands.step(run_id, 0)
        asks = desk.opened.approvals
        (one,) = await asks.of_run(run_id)
        decision = Decision(approved=True, by="ada", at=one.ask.since)
        assert (await asks.decide(one, decision)).applied
        key = desk.opened.keys.run(run_id)
        await desk.opened.connection.execute("HSET", key, "execution_started", 1)
        await hands.step(run_id, 0)
        assert await messages(desk, HEAVY) == []
        (record,) = (await desk.stored(run_id)).log[0].result.tool_calls
        assert record.error is not None
        assert record.error.code == "TIMEOUT_ERROR"
        assert record.decision is not None
