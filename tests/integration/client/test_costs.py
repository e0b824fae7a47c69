"""The ledger of model calls: what was paid, what was lost, and what may have been paid."""

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from io import StringIO
from uuid import uuid4

import pytest
from rich.console import Console, RenderableType
from support.runs.stored_runs import USAGE, Bench, answered, called, failed, plain_agent
from support.runs.waits import let_pass

from stepfleet.orchestrator import (
    Agent,
    AsyncFleet,
    CallState,
    ConfigurationError,
    Costs,
    ErrorPolicy,
    FinishReason,
    LLMResponse,
    UsageStats,
)
from stepfleet.orchestrator.batches.results import slim
from stepfleet.orchestrator.cli.batches import summary
from stepfleet.orchestrator.cli.trace import trace
from stepfleet.orchestrator.events.envelope import Events
from stepfleet.orchestrator.protocol.attempt import Answered, Span
from stepfleet.orchestrator.protocol.claim import Claim
from stepfleet.orchestrator.protocol.lost_attempts import CallEntries
from stepfleet.orchestrator.protocol.revision import price_of
from stepfleet.orchestrator.records.run.facts import LostAttempt, LostKind
from stepfleet.orchestrator.records.steps import HandedOver, RunAgent
from stepfleet.orchestrator.records.usage import CacheUse, Spent
from stepfleet.orchestrator.store.batches.batches import run_id_of

AGENT = plain_agent(max_steps=6)
EACH = Decimal("0.25")


async def lose(desk: Bench, run_id: str) -> None:
    """Let the lease of a run's owner be over."""
    await desk.opened.connection.execute("HSET", desk.opened.keys.run(run_id), "lease", 0)


async def usd_of_lines(fleet: AsyncFleet, run_id: str | None = None) -> dict[str, Decimal]:
    sums: dict[str, Decimal] = {}
    async for line in fleet.cost_lines(run_id):
        sums[line.state] = sums.get(line.state, Decimal(0)) + (line.usd or 0)
    return sums


async def test_committed_calls_count_by_all_that_they_are_of(
    fleet: AsyncFleet, desk: Bench
) -> None:
    """COST-03, COST-09"""
    lines = [{"input": "a", "tenant": "acme"}, {"input": "b", "tenant": "other"}]
    batch = await fleet.submit_batch(lines, AGENT)
    alone = await fleet.submit(AGENT, "c", tenant="acme")
    for run_id, steps in ((run_id_of(batch.id, 0), 2), (run_id_of(batch.id, 1), 0), (alone, 1)):
        for step in range(steps):
            claim = await desk.claim(run_id, step)
            await desk.commit(claim, called(claim))
        claim = await desk.claim(run_id, steps)
        await desk.commit(claim, answered(claim))

    found = await fleet.costs("tenant,batch")
    groups = {tuple(row.group.values()): (row.calls, row.usd) for row in found.rows}
    assert groups == {
        ("acme", batch.id): (3, 3 * EACH),
        ("acme", ""): (2, 2 * EACH),
        ("other", batch.id): (1, EACH),
    }
    assert list(found.rows[0].group) == ["tenant", "batch"]
    total = found.total
    assert (total.calls, total.input_tokens, total.output_tokens) == (6, 60, 30)
    assert (total.usd, total.committed_usd, total.ambiguous_usd) == (6 * EACH, 6 * EACH, Decimal(0))
    by_rest = (await fleet.costs(["model", "agent", "day", "status"])).rows
    today = datetime.now(UTC).date().isoformat()
    assert [row.group for row in by_rest] == [
        {"day": today, "agent": "plain", "model": "none", "status": "committed"}
    ]
    assert (await fleet.costs(batch=batch.id, tenant="acme")).total.calls == 3
    for model, calls in (("none", 6), ("openai:none", 6), ("other", 0)):
        assert (await fleet.costs(model=model)).total.calls == calls
        assert len([line async for line in fleet.cost_lines(model=model)]) == calls
    assert (await fleet.costs("status", status="committed", tenant="acme")).total.calls == 5
    assert (await fleet.costs(status="lost")).rows == ()
    with pytest.raises(ConfigurationError, match="status: there is no 'paid'; use committed"):
        await fleet.costs(status="paid")
    assert (await fleet.costs(until=date(2026, 1, 1), since=date(2025, 1, 1))).total.calls == 0
    assert await usd_of_lines(fleet) == {"committed": 6 * EACH}
    assert len([line async for line in fleet.cost_lines(batch=batch.id)]) == 4


async def test_the_sums_stay_when_the_runs_are_gone(fleet: AsyncFleet, desk: Bench) -> None:
    run_id = await desk.create(tenant="acme")
    claim = await desk.claim(run_id)
    await desk.commit(claim, answered(claim))
    before = await fleet.costs("tenant,model")
    assert await fleet.runs.purge() == 1
    assert await fleet.costs("tenant,model") == before
    assert before.total.calls == 1
    assert await usd_of_lines(fleet) == {}


async def test_sums_are_exact_for_any_number_of_calls(fleet: AsyncFleet, desk: Bench) -> None:
    run_id = await desk.create()
    price, steps = 0.000_000_1, 150  # binary floats would add up to 0.000015000000000000048
    for step in range(steps):
        claim = await desk.claim(run_id, step)
        attempt = replace(called(claim), cost_usd=price)
        claim = replace(claim, config=claim.config.with_overrides({"max_steps": 1000}))
        await desk.commit(claim, attempt)
    found = (await fleet.costs()).total
    assert (found.calls, found.usd) == (steps, Decimal("0.000015"))
    (key,) = [
        one
        async for shard in _keys(desk)
        for one in await desk.opened.connection.execute("KEYS", f"{shard}costs:*")
    ]
    left = await desk.opened.connection.execute("TTL", key)
    assert 90 * 86400 < left <= 92 * 86400


async def _keys(desk: Bench):  # type: ignore[no-untyped-def]  # noqa: ANN202
    for shard in range(desk.opened.keys.shards):
        yield desk.opened.keys.tag(shard).replace("{", "\\{")


async def states_of(fleet: AsyncFleet) -> tuple[object, ...]:
    total = (await fleet.costs()).total
    lines = await usd_of_lines(fleet)
    assert lines.get("committed", 0) == total.committed_usd
    assert lines.get("lost", 0) == total.lost_usd
    assert lines.get("ambiguous", 0) == total.ambiguous_usd
    return total.committed_usd, total.lost_usd, total.ambiguous_usd, total.unpriced_calls


def guess(claim: Claim) -> Spent:
    usage = UsageStats(prompt_tokens=10, completion_tokens=20, total_tokens=30, llm_calls=1)
    assert claim.unpriced
    return Spent(30, 0.5, usage=usage, model="openai:none")


async def test_a_call_whose_worker_was_lost_is_ambiguous_and_gets_a_price(
    fleet: AsyncFleet, desk: Bench
) -> None:
    run_id = await desk.create()
    first = await desk.claim(run_id)
    await lose(desk, run_id)
    second = await desk.claim(run_id)
    assert await states_of(fleet) == (0, 0, 0, 1)
    verdict = replace(desk.verdict(second, answered(second)), guess=(guess(second),))
    await desk.steps.commit(second, verdict, ())  # type: ignore[arg-type]
    assert await states_of(fleet) == (EACH, 0, Decimal("0.5"), 0)
    # The worker is alive after all: it had its answer, and its price is known now.
    await desk.commit(first, answered(first))
    assert await states_of(fleet) == (EACH, EACH, 0, 0)
    assert (await fleet.costs("status")).rows[0].group == {"status": "committed"}


async def test_a_cancelled_run_leaves_calls_without_a_price(fleet: AsyncFleet, desk: Bench) -> None:
    run_id = await desk.create()
    await desk.claim(run_id)
    await lose(desk, run_id)
    await fleet.runs.cancel(run_id)
    assert await states_of(fleet) == (0, 0, 0, 1)
    assert (await fleet.costs()).total.ambiguous_calls == 1


@pytest.mark.parametrize("is_handed_over", [False, True])
async def test_calls_of_a_run_that_is_cancelled_behind_its_workers_are_of_its_model(
    fleet: AsyncFleet, desk: Bench, *, is_handed_over: bool
) -> None:
    """Each is taken from the rows without a model, and counted once."""
    model = "openai:other"
    run_id = await fleet.submit(AGENT, "hi", model=model)
    if is_handed_over:
        first = await desk.claim(run_id)
        await desk.commit(first, await handed_over(desk, first, model))
    for _ in range(2):
        await desk.claim(run_id, int(is_handed_over))
        await lose(desk, run_id)
    await fleet.runs.cancel(run_id)
    rows = {one.group["model"]: one.ambiguous_calls for one in (await fleet.costs("model")).rows}
    assert {name: n for name, n in rows.items() if n} == {model.removeprefix("openai:"): 2}
    lost = (await fleet.runs.result(run_id)).lost_attempts
    assert {one.model for one in lost} == {model.removeprefix("openai:")}


async def test_a_failed_call_costs_what_its_provider_has_said(
    fleet: AsyncFleet, desk: Bench
) -> None:
    run_id = await desk.create()
    for spent in (Spent(12, 0.5, estimated=False), Spent(12, 1.0), None):
        claim = await desk.claim(run_id)
        await desk.commit(claim, replace(failed(claim, transient=True, limited=True), spent=spent))
        await let_pass(desk, run_id)
    assert await states_of(fleet) == (0, Decimal("0.5"), 1, 0)


async def test_an_answer_is_lost_with_the_run_and_found_with_its_retry(
    fleet: AsyncFleet, desk: Bench
) -> None:
    run_id = await desk.create()
    claim = await desk.claim(run_id)
    attempt = called(claim, error=True)
    await desk.steps.journal(
        claim,
        0.1,
        response=attempt.response,
        entries=CallEntries(price=price_of(1, USAGE, 0.25, "openai:none")),
    )
    await lose(desk, run_id)
    await fleet.runs.cancel(run_id)
    assert await states_of(fleet) == (0, EACH, 0, 0)
    await fleet.runs.retry(run_id)
    assert await states_of(fleet) == (0, 0, 0, 0)
    again = await desk.claim(run_id)
    assert again.journal.response == attempt.response
    await desk.commit(again, attempt)
    assert await states_of(fleet) == (EACH, 0, 0, 0)


async def test_a_late_commit_of_a_journaled_answer_is_no_second_payment(
    fleet: AsyncFleet, desk: Bench
) -> None:
    run_id = await desk.create()
    first = await desk.claim(run_id)
    attempt = called(first)
    await desk.steps.journal(first, 0.1, response=attempt.response)
    await lose(desk, run_id)
    second = await desk.claim(run_id)
    await desk.commit(second, attempt)
    await desk.commit(first, replace(attempt, noted=True))
    assert await states_of(fleet) == (EACH, 0, 0, 0)


async def test_a_step_that_is_taken_back_is_paid_once(fleet: AsyncFleet, desk: Bench) -> None:
    run_id = await desk.create()
    claim = await desk.claim(run_id)
    await desk.commit(claim, failed(claim))
    await fleet.runs.retry(run_id)
    claim = await desk.claim(run_id)
    await desk.commit(claim, answered(claim))
    assert await states_of(fleet) == (EACH, 0, 0, 0)
    fork = await fleet.history.fork(run_id, at=0, new_run_id=str(uuid4()))
    claim = await desk.claim(fork)
    await desk.commit(claim, answered(claim))
    assert await states_of(fleet) == (2 * EACH, 0, 0, 0)


async def test_a_cached_answer_says_what_it_has_saved(fleet: AsyncFleet, desk: Bench) -> None:
    """COST-13"""
    run_id = await desk.create()
    claim = await desk.claim(run_id)
    use = CacheUse(key="k", hit=True, saved_tokens=15, saved_usd=0.125)
    attempt = Answered(Span(claim.now, 0.1), LLMResponse(content="fine", cache=use))
    await desk.commit(claim, attempt)
    total = (await fleet.costs()).total
    assert (total.calls, total.cached_calls, total.usd) == (0, 1, Decimal(0))
    assert total.saved_usd == Decimal("0.125")
    (line,) = [line async for line in fleet.cost_lines(run_id)]
    assert (line.state, line.usd) == (CallState.CACHED, Decimal(0))
    assert line.saved_usd == Decimal("0.125")


async def test_models_without_a_price_are_named(fleet: AsyncFleet, desk: Bench) -> None:
    desk.steps.has_price = lambda _, model: model != "none"
    run_id = await desk.create()
    claim = await desk.claim(run_id)
    await desk.commit(claim, answered(claim))
    found: Costs = await fleet.costs("agent")
    assert found.unpriced_models == ("none",)
    assert found.total.default_priced_calls == 1


async def test_a_step_that_is_taken_back_leaves_no_default_price(
    fleet: AsyncFleet, desk: Bench
) -> None:
    desk.steps.has_price = lambda _, model: model != "none"
    run_id = await desk.create()
    claim = await desk.claim(run_id)
    await desk.commit(claim, called(claim, error=True))
    found = await fleet.costs()
    assert (found.total.default_priced_calls, found.unpriced_models) == (1, ("none",))
    await fleet.runs.retry(run_id)
    found = await fleet.costs()
    assert (found.total.calls, found.total.default_priced_calls, found.unpriced_models) == (
        0,
        0,
        (),
    )


async def test_calls_count_by_the_lane_in_which_they_were_served(
    fleet: AsyncFleet, desk: Bench
) -> None:
    """LANE-01: committed, lost, cached and taken back; sums and lines agree."""
    for tier in ("", "flex", "flex", "priority", "turbo"):
        run_id = await desk.create()
        claim = await desk.claim(run_id)
        attempt = answered(claim)
        response = attempt.response.model_copy(update={"service_tier": tier})
        await desk.commit(claim, replace(attempt, response=response))
    lost = await desk.create()
    claim = await desk.claim(lost)
    attempt = called(claim, error=True)
    price = price_of(1, USAGE, 0.25, "openai:none", "flex")
    await desk.steps.journal(
        claim, 0.1, response=attempt.response, entries=CallEntries(price=price)
    )
    await lose(desk, lost)
    await fleet.runs.cancel(lost)

    found = await fleet.costs("lane,status")
    groups = {tuple(row.group.values()): (row.calls, row.usd) for row in found.rows}
    assert groups == {
        ("standard", "committed"): (1, EACH),
        ("flex", "committed"): (2, 2 * EACH),
        ("flex", "lost"): (1, EACH),
        ("priority", "committed"): (1, EACH),
        ("other", "committed"): (1, EACH),
    }
    assert (await fleet.costs(lane="flex")).total.calls == 3
    lanes = [line.lane async for line in fleet.cost_lines()]
    assert sorted(lanes) == ["flex", "flex", "flex", "other", "priority", "standard"]
    assert len([line async for line in fleet.cost_lines(lane="flex")]) == 3
    with pytest.raises(ConfigurationError, match="lane: there is no 'turbo'; use standard, flex"):
        await fleet.costs(lane="turbo")


async def test_a_step_that_is_taken_back_is_taken_from_its_lane(
    fleet: AsyncFleet, desk: Bench
) -> None:
    """LANE-01"""
    run_id = await desk.create()
    claim = await desk.claim(run_id)
    attempt = called(claim, error=True)
    response = attempt.response.model_copy(update={"service_tier": "flex"})
    await desk.commit(claim, replace(attempt, response=response))
    (step,) = (await fleet.runs.result(run_id)).steps
    assert step.service_tier == "flex"
    await fleet.runs.retry(run_id)
    assert (await fleet.costs("lane")).rows == ()
    again = await desk.claim(run_id)
    assert again.journal.response is not None
    assert again.journal.response.service_tier == "flex"
    await fleet.runs.cancel(run_id)
    assert {tuple(one.group.values()) for one in (await fleet.costs("lane")).rows} <= {("flex",)}


async def test_a_cost_by_the_default_price_is_marked_wherever_it_is_shown(
    fleet: AsyncFleet, desk: Bench
) -> None:
    """COST-06"""
    batch = await fleet.submit_batch([{"input": "a"}, {"input": "b"}], AGENT)
    unknown, known = (run_id_of(batch.id, row) for row in range(2))
    claim = await desk.claim(known)
    await desk.commit(claim, answered(claim))
    assert (await batch.progress()).default_priced_usd == 0
    desk.steps.has_price = lambda _, model: model != "none"
    claim = await desk.claim(unknown)
    await desk.commit(claim, called(claim, error=True))

    status = await batch.progress()
    assert (status.cost_usd, status.default_priced_usd) == (0.5, 0.25)
    results = [await fleet.runs.result(one) for one in (unknown, known)]
    assert [one.price_estimated for one in results] == [True, False]
    assert [one.steps[0].price_estimated for one in results] == [True, False]
    assert [one.to_dict()["price_estimated"] for one in results] == [True, False]
    assert slim(results[0])["price_estimated"] is True
    assert "price_estimated" not in slim(results[1])
    page = {one.run_id: one.price_estimated for one in (await fleet.runs.page()).runs}
    assert page == {unknown: True, known: False}
    timeline = await fleet.runs.timeline(unknown)
    assert (timeline.run.price_estimated, timeline.steps[0].price_estimated) == (True, True)
    lines = {one.run_id: one.price_estimated async for one in fleet.cost_lines()}
    assert lines == page
    assert "(an estimate: no price is known for a model)" in results[0].explain()
    shown = StringIO()
    Console(file=shown, width=300).print(
        trace(results[0], {}, full=True), summary(status, await batch.failures())
    )
    text = shown.getvalue()
    assert "~$0.2500 (an estimate: no price is known for a model" in text
    assert "~$0.50" in text
    assert "of it at a default price" in text
    await fleet.runs.retry(unknown)
    status = await batch.progress()
    assert (status.cost_usd, status.default_priced_usd) == (0.25, 0)


@pytest.mark.parametrize(
    ("reason", "name", "words"),
    [
        (FinishReason.LENGTH, "cut_answers", "cut at the token limit (max_tokens)"),
        (FinishReason.CONTENT_FILTER, "filtered_answers", "cut by the provider's content filter"),
    ],
)
async def test_estimates_and_answers_that_are_not_whole_are_marked_wherever_they_are_shown(
    fleet: AsyncFleet, desk: Bench, reason: FinishReason, name: str, words: str
) -> None:
    """LLM-12: no whole answer with a reported usage is."""
    batch = await fleet.submit_batch([{"input": "a"}, {"input": "b"}], AGENT)
    marked, whole = (run_id_of(batch.id, row) for row in range(2))
    for run_id, changes in (
        (marked, {"finish_reason": reason, "usage_estimated": True}),
        (whole, {}),
    ):
        claim = await desk.claim(run_id)
        attempt = answered(claim)
        assert attempt.response is not None
        changed = attempt.response.model_copy(update=changes)
        await desk.commit(claim, replace(attempt, response=changed))

    results = [await fleet.runs.result(one) for one in (marked, whole)]
    assert [one.to_dict()["usage_estimated"] for one in results] == [True, False]
    assert [one.to_dict()["finish_reason"] for one in results] == [reason, FinishReason.STOP]
    lines = [slim(one) for one in results]
    assert [one.get("usage_estimated") for one in lines] == [True, None]
    assert [one.get("finish_reason") for one in lines] == [reason, None]
    assert {one.run_id: one.usage_estimated for one in (await fleet.runs.page()).runs} == {
        marked: True,
        whole: False,
    }
    timeline = await fleet.runs.timeline(marked)
    assert (timeline.run.usage_estimated, timeline.steps[0].usage_estimated) == (True, True)
    status = await batch.progress()
    texts = [printed(trace(one, {}, full=True)) for one in results]
    assert f"the answer was {words}" in texts[0]
    assert texts[0].count("~$0.2500") == texts[0].count("~15 tokens") == 2, "run and step"
    assert "~" not in texts[1]
    assert "the answer was" not in texts[1]
    assert getattr(status, name) == status.cut_answers + status.filtered_answers == 1
    assert "answers cut" in printed(summary(status, await batch.failures()))
    await fleet.runs.send(marked, "go on")
    status = await batch.progress()
    assert (status.cut_answers, status.filtered_answers) == (0, 0), "it has no answer any more"


def printed(shown: RenderableType) -> str:
    out = StringIO()
    Console(file=out, width=300).print(shown)
    return out.getvalue()


async def test_too_many_different_calls_lose_their_batch_and_no_cent(
    fleet: AsyncFleet, desk: Bench
) -> None:
    run_id = await desk.create()
    shard = desk.opened.keys.tag(desk.opened.keys.shard_of(run_id))
    day = (datetime.now(UTC).date() - date(1970, 1, 1)).days
    whose = '["committed","acme","a%d","m"]'
    numbers = f"{day} 1 2 0 0 3 0 0 1000000 0 0 0 0"
    lines = [f"{numbers}\n{whose % (n % 600)}\nb{n}" for n in range(2300)]
    await desk.opened.connection.execute("RPUSH", f"{shard}costs", *lines)
    for step in range(5):
        claim = await desk.claim(run_id, step)
        await desk.commit(claim, called(claim))
    assert await desk.opened.connection.execute("LLEN", f"{shard}costs") < 130
    assert await desk.opened.connection.execute("HLEN", f"{shard}costs:{day}") <= 1502
    found = await fleet.costs("batch", tenant="acme")
    assert found.total.calls + (await fleet.costs(tenant="*")).total.calls == 2300 + 5
    others = next(row for row in found.rows if row.group == {"batch": "*"})
    assert others.calls > 500
    assert (await fleet.costs()).total.usd == Decimal("2.3") + 5 * EACH


async def test_bad_questions_name_field_and_fix(fleet: AsyncFleet) -> None:
    with pytest.raises(ConfigurationError, match="by: there is no 'user'; use day, tenant"):
        await fleet.costs("user")
    today = datetime.now(UTC).date()
    with pytest.raises(ConfigurationError, match="is after"):
        await fleet.costs(since=today, until=today - timedelta(days=1))
    with pytest.raises(ConfigurationError, match="no batch has the id"):
        [line async for line in fleet.cost_lines(batch="x")]


async def handed_over(desk: Bench, claim: Claim, model: str = "openai:none") -> Answered:
    """Return an attempt after which another agent goes on."""
    other = Agent("other", model=model, max_steps=6)
    digest = await desk.opened.configs.save(other.config)
    by = RunAgent(name=claim.config.name, config=claim.config_digest)
    to = RunAgent(name="other", config=digest)
    return replace(called(claim), handoff=HandedOver(by=by, to=to))


async def by_agent(fleet: AsyncFleet) -> dict[str, tuple[int, int, int]]:
    rows = (await fleet.costs("agent")).rows
    return {
        row.group["agent"]: (row.calls - row.lost_calls, row.lost_calls, row.ambiguous_calls)
        for row in rows
    }


@pytest.mark.parametrize("late", [called, failed])
async def test_a_call_of_the_agent_before_a_hand_off_stays_with_it(
    fleet: AsyncFleet, desk: Bench, late: Callable[[Claim], Answered]
) -> None:
    """Its worker stalls, another one hands over, and then the first one writes."""
    run_id = await desk.create()
    stalled = await desk.claim(run_id)
    await lose(desk, run_id)
    second = await desk.claim(run_id)
    assert await by_agent(fleet) == {"plain": (0, 0, 1)}
    await desk.commit(second, await handed_over(desk, second))
    verdict = desk.verdict(stalled, late(stalled))
    failed_before = LostAttempt(kind=LostKind.FAILED, step=1, ambiguous=True, model="none")
    verdict = replace(verdict, failed=(failed_before,))
    assert not (await desk.steps.commit(stalled, verdict, Events([]))).applied
    sums = await by_agent(fleet)
    third = await desk.claim(run_id, 1)
    assert third.config.name == "other"
    await desk.commit(third, answered(third))
    sums = await by_agent(fleet)
    assert sums.pop("other") == (1, 0, 0)
    assert list(sums) == ["plain"]
    assert sums["plain"] == ((1, 1, 1) if late is called else (1, 0, 1))


async def test_a_hand_off_that_is_taken_back_takes_its_calls_from_its_agent(
    fleet: AsyncFleet, desk: Bench
) -> None:
    run_id = await desk.create()
    claim = await desk.claim(run_id)
    attempt = await handed_over(desk, claim)
    broken = called(claim, error=True)
    policy = ErrorPolicy.stop_on_any_error()
    stopping = replace(claim, config=claim.config.model_copy(update={"error_policy": policy}))
    await desk.commit(stopping, replace(broken, handoff=attempt.handoff))
    assert (await desk.stored(run_id)).state.status.is_terminal
    assert await by_agent(fleet) == {"plain": (1, 0, 0)}
    assert (await fleet.runs.retry(run_id)).outcome == "retried"
    assert await by_agent(fleet) == {}, "the answer is used again"
