"""Admitted steps reach their queue, also where that takes no messages at first."""

import asyncio
import json
import time
from dataclasses import replace

import pytest
from support.deadlines import until
from support.runs.stored_runs import Bench, bench, called

from stepfleet.orchestrator.errors import StoreError
from stepfleet.orchestrator.limits.estimates import Amounts
from stepfleet.orchestrator.limits.limit import names_of
from stepfleet.orchestrator.protocol.attempt import Parked, Wait
from stepfleet.orchestrator.protocol.claim import Refusal, Refused, Work
from stepfleet.orchestrator.store import keys
from stepfleet.orchestrator.store.admission import (
    DONE,
    GRANTED,
    TICK,
    WAITS,
    GrantRequest,
    charging,
    refunding,
    settling,
)
from stepfleet.orchestrator.store.codec import milliseconds
from stepfleet.worker.leases.lease import Leases
from stepfleet.worker.runtime.admission.admitted_steps import AdmittedSteps
from stepfleet.worker.runtime.admission.gate import Gate
from stepfleet.worker.runtime.admission.ticker import Ticker

MODEL = "openai:m"
LINE = ("a", "", (MODEL,), Amounts())


async def test_what_the_queue_refuses_is_dispatched_when_it_takes_messages_again(
    desk: Bench,
) -> None:
    store = desk.opened
    queue = store.dispatch.key_of(store.dispatch.queue)
    gate = Gate(store, "w1")
    await gate.settings.change(MODEL, {"in_flight": 3})
    await store.connection.execute("SET", queue, "no list")  # every push fails
    for number in range(3):
        request = GrantRequest(Work(f"r{number}", 0), "a", "", (MODEL,), Amounts())
        assert await gate.call(request.operation("ask")) == GRANTED
        await gate.call(TICK)
    await gate.publish_again()
    assert gate.active, "somebody comes back"
    await store.connection.execute("DEL", queue)
    await gate.publish_again()
    assert await store.connection.execute("LLEN", queue) == 3
    await gate.publish_again()
    assert await store.connection.execute("LLEN", queue) == 3, "once"
    await gate.aclose()


async def test_an_answer_that_comes_while_limits_are_read_waits_for_them(
    desk: Bench,
) -> None:
    """Of many calls refused at once each finds the limit that the first refusal has made."""
    gate = Gate(desk.opened, "w1")
    found: list[bool] = []

    async def refused() -> None:
        gate.note_refusal("openai:m", 1.0, 0.0)
        await gate.pauses("openai:m")
        found.append("openai:m" in gate.limits)

    reads = gate.reload
    begun, goes_on = asyncio.Event(), asyncio.Event()

    async def slow() -> None:
        begun.set()
        await goes_on.wait()
        await reads()

    gate.reload = slow  # type: ignore[method-assign]
    calls = [asyncio.create_task(refused()) for _ in range(4)]
    await begun.wait()
    await asyncio.sleep(0)
    assert found == []
    goes_on.set()
    await asyncio.gather(*calls)
    assert found == [True] * 4
    await gate.aclose()


async def test_a_limit_that_a_refusal_states_holds_at_once(desk: Bench) -> None:
    gate = Gate(desk.opened, "w1")
    gate.note_refusal("openai:m", 0.0, 0.0, {"r": 600.0})
    await gate.pauses("openai:m")
    state = await desk.opened.connection.execute(
        "HGET", desk.opened.keys.of(keys.LIMIT_STATE), "openai:m"
    )
    assert json.loads(state)["l"]["said"] == {"r": 600}
    await gate.aclose()


async def next_millisecond(desk: Bench) -> None:
    """Wait for Redis's clock: that of places has milliseconds."""
    began = milliseconds(await desk.runs.now())

    async def has_come() -> bool:
        return milliseconds(await desk.runs.now()) > began

    await until(has_come, what="the next millisecond")


@pytest.mark.parametrize("is_busy", [True, False])
async def test_runs_of_a_lost_flow_ask_once_more_in_a_fleet_that_is_never_idle(
    desk: Bench, is_busy: bool
) -> None:
    gate = Gate(desk.opened, "w1")
    await gate.settings.change(MODEL, {"in_flight": 1})
    lost = {f"r{number}": GrantRequest(Work(f"r{number}", 0), *LINE) for number in range(4)}
    begun, late, other = (GrantRequest(Work(name, 0), *LINE) for name in ("begun", "late", "other"))
    other = replace(other, priority=2)
    assert await gate.call(begun.operation("ask")) == GRANTED
    for one in (*lost.values(), other):
        assert await gate.call(one.operation("ask")) == WAITS
    execute = desk.opened.connection.execute
    assert await execute("DEL", f"sf:{{limits}}:flow:2{MODEL}\x1f\x1f{MODEL}") == 1
    await next_millisecond(desk)
    waiting = [*lost, "other"]
    if is_busy:
        waiting.append("late")
        assert await gate.call(late.operation("ask")) == WAITS  # into a new list of that name
    else:
        await gate.call(TICK)
    assert await gate.calls.lost_among([*waiting, "begun"]) == [*lost, "other"]
    await next_millisecond(desk)
    for one in (*lost.values(), other):
        assert await gate.call(one.operation("ask")) == WAITS
    assert await gate.calls.lost_among(waiting) == [], "once"
    granted = ["begun"]
    while await gate.call(refunding(Work(granted[-1], 0))) == DONE:
        found = set(await execute("HKEYS", "sf:{limits}:grants"))
        granted += found
    assert sorted(granted) == sorted({*waiting, "begun"}), "each once"
    await gate.aclose()


async def test_a_run_that_is_cancelled_leaves_its_line(desk: Bench) -> None:
    gate = Gate(desk.opened, "w1")
    await gate.settings.change(MODEL, {"in_flight": 1})
    ticker = Ticker(desk.opened, gate, Leases(time.monotonic))
    cancelled, other = await desk.create(), await desk.create()
    for run_id in ("begun", cancelled, other):
        await gate.call(GrantRequest(Work(run_id, 0), *LINE).operation("ask"))
    await desk.control.cancel_unread(cancelled, "enough")
    execute = desk.opened.connection.execute

    async def is_gone() -> bool:
        await ticker.turn()
        return float(await execute("ZSCORE", "sf:{limits}:lines", MODEL) or 0) == 1

    await until(is_gone, within=30, what="a line of one run")
    assert await execute("HKEYS", "sf:{limits}:waiting") == [other]
    await gate.aclose()


async def test_a_grant_is_renewed_while_its_step_is_held_here_and_no_longer(redis_url: str) -> None:
    """Redis may give the step to another; where its hint is lost then, it is dispatched again."""
    async with bench(redis_url, lease=1.0) as desk:
        gate, leases = Gate(desk.opened, "w1"), Leases(time.monotonic)
        await gate.settings.change(MODEL, {"in_flight": 1})
        ticker = Ticker(desk.opened, gate, leases)
        await ticker.prepare()
        claim = await desk.claim(await desk.create())
        first = GrantRequest(claim.hint, "plain", "", (MODEL,), Amounts())
        assert await gate.call(first.operation("try")) == GRANTED
        gate.use(first, MODEL)
        with leases.hold(claim):
            ends = time.monotonic() + 3 * desk.opened.settings.lease

            async def is_over() -> bool:
                await ticker.turn()
                return time.monotonic() > ends

            await until(is_over, within=60, what="the end of three leases")
            assert claim.run_id in gate.held
        before = await desk.queued()

        async def is_dispatched() -> bool:
            await ticker.turn()
            return await desk.queued() != before

        await until(is_dispatched, within=30, what="a hint of the step")
        assert claim.run_id not in gate.held
        await gate.aclose()


async def test_a_change_of_one_limit_leaves_the_others_as_they_are_read(desk: Bench) -> None:
    """Thousands of runs may have limits of their own, and each new one changes the version."""
    gate = Gate(desk.opened, "w1")
    for number in range(3):
        await gate.settings.change(f"tenant:t{number}", {"in_flight": 3})
    await gate.reload()
    before = gate.limits
    await gate.settings.change("tenant:t1", {"in_flight": 4})
    await gate.reload()
    assert gate.limits["tenant:t1"].in_flight == 4
    assert [gate.limits[name] is before[name] for name in sorted(before)] == [True, False, True]


async def test_the_grant_of_an_answered_step_is_spent_where_nobody_has_settled_it(
    redis_url: str,
) -> None:
    """Its worker died when the step had begun to wait for tools: the next hint comes too early."""
    async with bench(redis_url, lease=30.0) as desk:
        gate = Gate(desk.opened, "w1")
        await gate.settings.change("tenant:acme", {"calls": 9})
        await gate.reload()
        steps = AdmittedSteps(desk.steps, gate, lambda *_: 0.0)
        run_id = await desk.create(tenant="acme")
        hint = Work(run_id, 0)
        async with asyncio.timeout(20):
            while isinstance(claim := await steps.claim(hint, desk.token()), Refusal):
                await gate.call(TICK)  # brings what the ledger has
        attempt = called(claim)
        await desk.steps.journal(claim, 0.1, response=attempt.response)
        again = replace(claim, journal=replace(claim.journal, response=attempt.response))
        waits = (Wait(0, "heavy", "look"),)
        parked = Parked(attempt.span, waits, replace(attempt, records=(), texts=(), cost_usd=0.0))
        await desk.commit(again, parked)
        refused = await steps.claim(hint, desk.token())
        assert isinstance(refused, Refusal)
        assert refused.why is Refused.EARLY
        (use,) = (one.budgets[0] for one in await gate.settings.use() if one.budgets)
        assert use.spent == 1
        assert use.reserved == 0
        await gate.aclose()


async def test_one_bad_operation_fails_alone(desk: Bench) -> None:
    """Others of its call are applied: a number that cannot be written, an operation that breaks."""
    gate = Gate(desk.opened, "w1")
    await desk.opened.connection.execute(
        "HSET", desk.opened.keys.of(keys.LIMIT_SETTINGS), MODEL, '{"in_flight":9}'
    )
    request = GrantRequest(Work("r0", 0), "a", "", (MODEL,), Amounts())
    unwritten = settling(Work("r1", 0), Amounts(output_tokens=10**30))
    broken = {"op": "headers", "names": [MODEL], "said": 7}
    replies = [gate.call(one) for one in (unwritten, broken, request.operation("try"))]
    found = await asyncio.gather(*replies, return_exceptions=True)
    assert [isinstance(one, StoreError) for one in found[:2]] == [True, True]
    assert "64-bit" in str(found[0])
    assert found[2] == GRANTED
    await gate.aclose()


async def test_a_model_of_which_nothing_is_to_be_learned_gets_no_limit(desk: Bench) -> None:
    """`learn = false`, of a model or of its service."""
    gate = Gate(desk.opened, "w1")
    for name, known in (("openai:m", "openai:m"), ("openai:n at host/v1", "openai:*")):
        await gate.settings.change(known, {"learn": False})
        await gate.reload()
        for _ in range(5):
            gate.note_refusal(name, 60.0, 0.0)
            assert not await gate.pauses(name)
        assert await gate.may_call(name)
        assert set(await gate.settings.names()) == {known}
        assert not (await gate.settings.use())[0].refused
        await gate.settings.clear([known])
    await gate.aclose()


async def test_what_one_address_refuses_holds_for_no_other(desk: Bench) -> None:
    """LLM-15: what is set for a model holds for each of them by itself."""
    gate = Gate(desk.opened, "w1")
    other = f"{MODEL} at gateway.example/v1"
    for _ in range(5):
        gate.note_refusal(other, 60.0, 0.0)
    assert await gate.pauses(other)
    assert list(gate.limits) == [other]
    assert names(gate, MODEL) == ()
    assert names(gate, other) == (other,)
    await gate.settings.clear([other])
    await gate.call(charging((other,), Amounts(0)))  # to clear a limit ends its pause
    await gate.settings.change(MODEL, {"in_flight": 1})
    await gate.reload()
    assert names(gate, other) == (other,)
    for number, name in enumerate((MODEL, other)):
        request = GrantRequest(Work(f"r{number}", 0), "a", "", (name,), Amounts())
        assert await gate.call(request.operation("try")) == GRANTED
        again = GrantRequest(Work(f"again{number}", 0), "a", "", (name,), Amounts())
        assert await gate.call(again.operation("try")) == "full"
    for _ in range(5):
        gate.note_refusal(other, 60.0, 0.0)
    assert await gate.pauses(other)
    assert await gate.settings.names() == [MODEL], "what is set for the model is not replaced"
    cools = {one.name: one.cool_seconds > 0 for one in await gate.settings.use()}
    assert cools == {MODEL: False, other: True}
    await gate.settings.change(MODEL, {"usd": 5})
    await gate.reload()
    assert names(gate, other) == (other, MODEL), "budgets hold for all addresses together"
    await gate.aclose()


def names(gate: Gate, name: str) -> tuple[str, ...]:
    return names_of(gate.limits, model=name, tenant="", batch="", agent="a")
