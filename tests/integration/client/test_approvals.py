"""Decisions of people reach the calls that were meant, and no others."""

import threading
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from support.deadlines import until
from support.runs.asking_runs import asks, clerk, pay, waiting, worked_on
from support.runs.scripted_steps import Script, call, say

from stepfleet.orchestrator import (
    Agent,
    AskCount,
    AsyncFleet,
    ConfigurationError,
    ErrorPolicy,
    ask_person,
    tool,
)
from stepfleet.orchestrator.client.fleet import store_of
from stepfleet.orchestrator.store.fleet.checks import Check, fleet_checks, read_fleet
from stepfleet.orchestrator.store.fleet.figures import fleet_figures
from stepfleet.orchestrator.tools import ToolInvocation
from stepfleet.orchestrator.tools.definition import ToolOptions


async def test_calls_that_wait_later_are_not_decided(fleet: AsyncFleet, redis_url: str) -> None:
    agent = clerk(asks(10), say("done"))
    first = await fleet.submit(agent, "pay")
    async with worked_on(redis_url, agent, first):
        (known,) = await waiting(fleet, 1)
    second = await fleet.submit(agent, "pay")
    async with worked_on(redis_url, agent, second):
        await waiting(fleet, 2)
    earlier = await fleet.decide(tool="pay", before=known.since - timedelta(milliseconds=1))
    assert earlier.applied == 0
    assert (await fleet.decide(tool="pay", before=known.since)).applied == 1
    (left,) = await waiting(fleet, 1)
    assert left.run_id == second


@pytest.mark.parametrize(("call_limit", "run_limit", "first"), [(900, 60, 60), (60, 900, 60)])
async def test_a_call_waits_until_the_earlier_of_its_own_and_the_runs_time(
    fleet: AsyncFleet, redis_url: str, call_limit: float, run_limit: float, first: float
) -> None:
    """Also a page and `of_run` say so, and the run that is paused and goes on."""

    @tool(name="pay", approval=True, approval_timeout=call_limit)
    def limited(usd: int) -> str:
        """Pay somebody."""
        return f"paid {usd}"

    agent = clerk(asks(10), say("done"), tools=[limited], time_limit=run_limit)
    run_id = await fleet.submit(agent, "pay")
    async with worked_on(redis_url, agent, run_id):
        (ask,) = await waiting(fleet, 1)
    assert ask.until is not None
    assert first - 30 < (ask.until - ask.since).total_seconds() <= first
    assert await fleet.approvals.of_run(run_id) == (ask,)
    await fleet.runs.pause(run_id)
    await fleet.runs.resume(run_id)
    (again,) = await fleet.approvals.of_run(run_id)
    assert again.until is not None
    assert ask.until <= again.until < ask.until + timedelta(seconds=30)


async def test_metrics_and_doctor_count_what_waits(fleet: AsyncFleet, redis_url: str) -> None:
    """Calls of a cancelled run wait for nobody."""
    agent = clerk(call(("pay", {"usd": 1}), ("pay", {"usd": 2})), say("done"), time_limit=300)
    store = await store_of(fleet)

    async def found() -> list[Check]:
        read = await read_fleet(store)
        return [one for one in fleet_checks(read, "agents") if one.check == "approvals"]

    assert await found() == []
    nothing = await fleet_figures(store)
    assert (nothing.waiting_for_people, nothing.oldest_waiting_for_people_seconds) == (0, 0.0)
    first, second = await fleet.submit(agent, "pay"), await fleet.submit(agent, "pay")
    async with worked_on(redis_url, agent, first, second):
        await waiting(fleet, 4)
    figures = await fleet_figures(store)
    assert figures.waiting_for_people == 4
    assert 0 <= figures.oldest_waiting_for_people_seconds < 300
    (check,) = await found()
    assert "4 calls wait for people, the first since" in check.found
    await fleet.decide(first, call=1)
    await fleet.runs.cancel(second)
    (check,) = await found()
    assert "1 call waits for people, the first since" in check.found
    assert (await fleet_figures(store)).waiting_for_people == 1


async def test_a_key_names_one_call_and_not_the_next_at_its_place(
    fleet: AsyncFleet, redis_url: str
) -> None:
    agent = clerk(asks(10), asks(10_000), say("done"))
    run_id = await fleet.submit(agent, "pay")
    async with worked_on(redis_url, agent, run_id):
        (seen,) = await waiting(fleet, 1)
        await fleet.decide(run_id, approve=False, reason="too much", by="bob")

        async def is_another() -> bool:
            found = [one async for one in fleet.approvals.all()]
            return [one.arguments for one in found] == [{"usd": 10_000}]

        await until(is_another, what="the next call")
        with pytest.raises(ConfigurationError, match="does not wait for that call, but for: 0 "):
            await fleet.decide(run_id, key=seen.key)
        assert (await fleet.decide(key=seen.key)).applied == 0
        (left,) = await waiting(fleet, 1)
    assert left.key != seen.key
    assert left.group != seen.group
    assert len(left.group) == 32


async def test_what_cannot_be_made_is_answered_without_a_person(
    fleet: AsyncFleet, redis_url: str
) -> None:
    wrong = call(("pay", {"usd": "much"}), ("ask_person", {"question": "which?", "options": 5}))
    agent = clerk(wrong, say("done"), error_policy=ErrorPolicy.ignore_tool_errors())
    run_id = await fleet.submit(agent, "pay")
    async with worked_on(redis_url, agent, run_id):
        result = await fleet.runs.wait(run_id, timeout=30)
    assert result.success
    assert [one.is_error for one in result.steps[0].tool_calls] == [True, True]


async def test_a_question_is_answered_from_its_options_and_left_by_approvals(
    fleet: AsyncFleet, redis_url: str
) -> None:
    both = call(("ask_person", {"question": "which?", "options": ["1", "2"]}), ("pay", {"usd": 1}))
    agent = clerk(both, say("done"))
    run_id = await fleet.submit(agent, "pay")
    async with worked_on(redis_url, agent, run_id):
        await waiting(fleet, 2)
        assert (await fleet.decide(agent="clerk", by="ada")).applied == 1
        (question,) = await waiting(fleet, 1)
        assert question.kind == "question"
        with pytest.raises(ConfigurationError, match=f"none of the options of run {run_id}: 1, 2"):
            await fleet.decide(run_id, answer="3")
        assert (await fleet.decide(run_id, answer="2", by="\ud800")).applied == 1
        result = await fleet.runs.wait(run_id, timeout=30)
    assert [one.result for one in result.steps[0].tool_calls] == ["2", "paid 1"]


async def test_a_batch_has_the_calls_of_the_runs_below_its_own(
    fleet: AsyncFleet, redis_url: str
) -> None:
    below = clerk(asks(10), say("paid"))
    script = Script([call(("clerk", {"input": "pay"})), say("done")])
    boss = Agent("boss", model=script, agents=[below], time_limit=None)
    batch = await fleet.submit_batch([{"input": "pay"}], boss)
    (run_id,) = batch.run_ids()
    async with worked_on(redis_url, boss, run_id):
        await waiting(fleet, 1, batch=batch.id)
        store = (await store_of(fleet)).approvals
        assert await fleet.approvals.of_batch(batch.id) == AskCount(count=1)
        assert await store.count_of_runs([run_id]) == AskCount(count=1)
        assert await store.count_of_runs([run_id[:-1]]) == AskCount()
        assert await fleet.approvals.of_batch("another") == AskCount()
        assert (await fleet.decide(batch=batch.id)).applied == 1
        assert await fleet.approvals.of_batch(batch.id) == AskCount()
        assert (await fleet.runs.wait(run_id, timeout=30)).success


async def test_events_of_requests_keep_arguments_to_themselves_by_default(
    fleet: AsyncFleet, redis_url: str
) -> None:
    agent = clerk(asks(10), say("done"))
    run_id = await fleet.submit(agent, "pay")
    async with worked_on(redis_url, agent, run_id):
        await waiting(fleet, 1)
        events = [one async for one in fleet.runs.events(run_id)]
    (asked,) = (one["payload"] for one in events if one["type"] == "agent.approval.requested")
    assert "args_summary" in asked
    assert not {"args", "arguments"} & asked.keys()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"cursor": "x"}, "cursor is not one"),
        ({"cursor": "nan x"}, "cursor is not one"),
        ({"cursor": "5"}, "cursor is not one"),
        ({"limit": 0}, "limit is 0; write a number"),
        ({"limit": "many"}, "limit is 'many'; write a number"),
        ({"tool": 5}, "'tool' is not a condition with text; write"),
        ({"kind": "Approvals"}, "kind is 'Approvals'; write approval or question"),
        ({"aprove": False}, "'aprove' is not a condition with text; did you mean 'approve'?"),
    ],
)
async def test_a_page_that_cannot_be_is_refused_by_its_field(
    fleet: AsyncFleet, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigurationError, match=says):
        await fleet.approvals.page(**options)


async def test_an_answer_that_one_of_the_questions_has_no_option_for_decides_nothing(
    fleet: AsyncFleet, redis_url: str
) -> None:
    """Of two pages of questions, the last has other options."""
    question = {"question": "which?", "options": ["1", "2"]}
    agent = clerk(call(("ask_person", question)), say("done"))
    teller = Agent(
        "teller",
        model=Script([call(("ask_person", {**question, "options": ["2", "3"]})), say("done")]),
        tools=[ask_person],
        time_limit=None,
    )
    ids = [await fleet.submit(agent, "pay") for _ in range(201)]
    async with worked_on(redis_url, agent, *ids):
        await waiting(fleet, 201)
    last = await fleet.submit(teller, "pay")
    async with worked_on(redis_url, teller, last):
        await waiting(fleet, 202)
    with pytest.raises(ConfigurationError, match=f"options of run {last}: 2, 3"):
        await fleet.decide(tool="ask_person", answer="1")
    await waiting(fleet, 202)
    assert (await fleet.decide(tool="ask_person", answer="2")).applied == 202


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"run_id": 5}, "run_id is 5"),
        ({"approve": "no"}, "approve is 'no'"),
        ({"call": "0"}, "call is '0'"),
        ({"call": True}, "call is True"),
        ({"reason": 7}, "reason is 7"),
        ({"answer": ["a"]}, "answer is"),
        ({"by": b"ada"}, "by is"),
        ({"before": 12}, "before is 12"),
        ({"before": datetime(2026, 1, 1)}, "before has no time zone"),  # noqa: DTZ001 - the bad input
        ({"approve": False, "answer": "green"}, "answer= and approve=False"),
        ({"answer": "a" * 16_001}, "answer has 16,001 characters"),
    ],
)
async def test_a_bad_decision_names_the_field(
    fleet: AsyncFleet, options: dict[str, Any], field: str
) -> None:
    with pytest.raises(ConfigurationError, match=field):
        await fleet.decide(**{"tool": "pay", **options})


@pytest.mark.parametrize("end", [SystemExit(3), KeyboardInterrupt(), ValueError("no")])
async def test_a_rule_that_raises_has_its_call_wait(
    end: BaseException, fleet: AsyncFleet, redis_url: str
) -> None:
    """Also what would end the worker."""

    def rule(_: ToolInvocation) -> bool:
        raise end

    agent = clerk(asks(10), say("done"), tools=[replace(pay, options=ToolOptions(approval=rule))])
    run = await fleet.submit(agent, "pay")
    async with worked_on(redis_url, agent, run):
        (ask,) = await waiting(fleet, 1)
    assert ask.run_id == run


async def test_a_rule_that_takes_too_long_has_its_call_wait_and_keeps_no_other_back(
    fleet: AsyncFleet, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepfleet.worker.toolbox.box.DEFAULT_TIMEOUT", 0.2)
    ends = threading.Event()

    def rule(invocation: ToolInvocation) -> bool:
        return invocation.arguments["usd"] > 10 and ends.wait(60)

    slow = replace(pay, options=ToolOptions(approval=rule))
    script = (call(*(("pay", {"usd": usd}) for usd in range(1, 21))), say("done"))
    agent = clerk(*script, tools=[slow])
    run = await fleet.submit(agent, "pay")
    async with worked_on(redis_url, agent, run):
        found = await waiting(fleet, 10)
    ends.set()
    assert {one.arguments["usd"] for one in found} == set(range(11, 21))
