"""What steps take of the fleet's limits and budgets, by the store that admits them."""

import asyncio
from dataclasses import replace

import pytest
from support.deadlines import until
from support.runs.opened_runs import lease_runs_out, opened_run
from support.runs.stored_runs import Bench, bench, plain_agent

from stepfleet.orchestrator import LLMResponse, ModelRequest, ModelSettings, ToolCall, UsageStats
from stepfleet.orchestrator.events.envelope import Events
from stepfleet.orchestrator.limits.estimates import MOST_FIRST_OUTPUT
from stepfleet.orchestrator.protocol.attempt import Answered, Parked, Span, Wait
from stepfleet.orchestrator.protocol.claim import Claim, Refusal, Work
from stepfleet.orchestrator.protocol.lost_attempts import CallEntries
from stepfleet.orchestrator.store.admission import refunding
from stepfleet.worker.runtime.admission.admitted_steps import AdmittedSteps
from stepfleet.worker.runtime.admission.gate import Gate
from stepfleet.worker.runtime.admission.learning import AT_ONCE, Learning
from stepfleet.worker.step import run_work

MODEL, TENANT = "openai:none", "tenant:acme"
USAGE = UsageStats(prompt_tokens=4000, completion_tokens=1000, total_tokens=5000, llm_calls=1)


async def opened(desk: Bench) -> tuple[AdmittedSteps, Gate]:
    """Return the store of steps, each token for a millionth of a USD, and its gate."""
    gate = Gate(desk.opened, "w1")
    await gate.reload()

    def price(_config: object, _model: str, usage: UsageStats) -> float:
        return (usage.prompt_tokens + usage.completion_tokens) / 1e6

    return AdmittedSteps(desk.steps, gate, price), gate


async def test_a_call_whose_tools_are_tasks_of_their_own_is_charged_with_its_tokens(
    desk: Bench,
) -> None:
    settings = Gate(desk.opened, "w0").settings
    await settings.change(MODEL, {"tokens_per_minute": 60_000, "burst": 60})
    await settings.change(TENANT, {"tokens": 1_000_000})
    steps, gate = await opened(desk)
    hint = Work(await desk.create(tenant="acme"), 0)

    async def admitted() -> Claim | None:
        claim = await steps.claim(hint, desk.token())
        return None if isinstance(claim, Refusal) else claim

    claim = await until(admitted, within=30, what="the look into the ledger, for the budget")
    assert claim is not None
    call = ToolCall(id="c", name="render", arguments={})
    response = LLMResponse(tool_calls=(call,), usage=USAGE)
    span = Span(claim.now, 0.1)
    parked = Parked(
        span,
        (Wait(0, "gpu", "render"),),
        Answered(span, response, cost_usd=0.005, noted=True),
    )
    verdict = desk.verdict(claim, parked)
    await steps.journal(claim, 0.1, response=response, entries=CallEntries(price=verdict.lost))
    assert (await steps.commit(claim, verdict, Events([]))).applied
    assert not gate.held
    assert await gate.call(refunding(hint)) == "none", "it is settled"
    uses = {one.name: one for one in await gate.settings.use()}
    assert uses[MODEL].in_flight == 0
    assert uses[MODEL].levels["tokens_per_minute"] < 57_000, "they fill by 1,000 in a second"
    assert [one.spent for one in uses[TENANT].budgets] == [5000]
    await gate.aclose()


@pytest.mark.parametrize(("most", "granted"), [(None, 1), (500, 2), (5000, 1)])
async def test_first_calls_of_an_agent_wait_for_each_other_where_a_budget_is_small(
    redis_url: str, most: int | None, granted: int
) -> None:
    """It pays for one that writes as much as it may; nothing is known of its answers yet."""
    agent = plain_agent(settings=ModelSettings(max_tokens=most))
    async with bench(redis_url, agent) as desk:
        settings = Gate(desk.opened, "w0").settings
        await settings.change(MODEL, {"usd": 0.006})
        steps, gate = await opened(desk)
        hints = [Work(await desk.create(), 0) for _ in range(2)]
        claims = [await steps.claim(hint, desk.token()) for hint in hints]
        assert [isinstance(one, Claim) for one in claims].count(True) == granted
        [use] = await gate.settings.use()
        assert use.budgets[0].spent == 0
        assert use.budgets[0].reserved * 10**6 > granted * min(most or MOST_FIRST_OUTPUT, 5000)
        await gate.aclose()


async def test_a_lost_call_of_a_run_that_waits_for_its_budget_has_a_price(redis_url: str) -> None:
    async with bench(redis_url, lease=600) as desk:
        settings = Gate(desk.opened, "w0").settings
        await settings.change(TENANT, {"usd": 0.000001, "on_budget": "hold"})
        steps, gate = await opened(desk)
        run_id = await desk.create(tenant="acme")
        await desk.claim(run_id)  # a worker that is gone
        await lease_runs_out(desk, run_id)
        refusal = await steps.claim(Work(run_id, 0), desk.token())
        assert isinstance(refusal, Refusal)
        [lost] = (await desk.stored(run_id)).result().lost_attempts
        assert lost.ambiguous
        assert lost.cost_usd is not None
        assert lost.cost_usd > 0.0002, "by the tokens of a first answer"
        assert not (await desk.header(run_id)).get("unpriced")
        await gate.aclose()


@pytest.mark.parametrize("calls", [False, True])
@pytest.mark.parametrize("ends", ["killed", "child died", "stopped"])
async def test_a_call_is_perhaps_paid_from_when_it_is_made_on(
    redis_url: str, ends: str, *, calls: bool
) -> None:
    """DIST-08: not while it waits for its turn, whether its worker is stopped or killed."""
    asked = asyncio.Event()

    async def endless(_: ModelRequest) -> LLMResponse:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    async with opened_run(redis_url, endless) as (desk, hands, run_id):
        steps, gate = await opened(desk)
        gate.learning = Learning(lambda: 0.0)  # time brings nobody a turn
        model = hands.agent.config.model
        others = 0 if calls else AT_ONCE
        assert [gate.learning.turn(model) for _ in range(others)] == [None] * others
        ports = replace(hands.ports(), store=steps, admit=steps.admit)
        step = asyncio.create_task(run_work(Work(run_id, 0), ports, hands.leases))

        async def waits() -> bool:
            return bool((await desk.header(run_id)).get("uncalled"))

        await (asyncio.wait_for(asked.wait(), 60) if calls else until(waits, within=60))
        if ends == "stopped":
            hands.leases.hand_back()
            await asyncio.wait_for(step, 60)
        if ends == "child died":
            assert await desk.marks.child_died(Work(run_id, 0), "test")
        if ends == "killed":
            await lease_runs_out(desk, run_id)
            heir = await desk.claim(run_id)
            assert heir.losses.uncalled is not calls
        lost = (await desk.stored(run_id)).result().lost_attempts
        step.cancel()
        await asyncio.wait([step], timeout=60)
        await gate.aclose()
    kind = "interrupted" if ends == "stopped" else "crash"
    assert [(one.kind, one.ambiguous) for one in lost] == [(kind, calls)]


async def test_a_worker_that_was_lost_before_its_call_has_spent_no_budget(redis_url: str) -> None:
    async with bench(redis_url, lease=600) as desk:
        await Gate(desk.opened, "w0").settings.change(TENANT, {"tokens": 1_000_000})
        steps, gate = await opened(desk)
        run_id = await desk.create(tenant="acme")
        hint = Work(run_id, 0)

        async def admitted() -> bool:
            return not isinstance(await steps.claim(hint, desk.token()), Refusal)

        await until(admitted, within=30, what="the look into the ledger, for the budget")
        await gate.call(refunding(hint))
        await lease_runs_out(desk, run_id)
        heir = await steps.claim(hint, desk.token())
        assert isinstance(heir, Claim)
        [spent] = [one.spent for use in await gate.settings.use() for one in use.budgets]
        [lost] = (await desk.stored(run_id)).result().lost_attempts
        await gate.aclose()
    assert not lost.ambiguous
    assert spent < 5000, "what the heir has reserved"


async def test_of_two_lost_workers_the_one_that_had_called_has_spent_once(redis_url: str) -> None:
    async with bench(redis_url, lease=600) as desk:
        await Gate(desk.opened, "w0").settings.change(TENANT, {"calls": 1000})
        steps, gate = await opened(desk)
        run_id = await desk.create(tenant="acme")
        hint = Work(run_id, 0)

        async def admitted() -> Claim | None:
            claim = await steps.claim(hint, desk.token())
            return claim if isinstance(claim, Claim) else None

        await until(admitted, within=30, what="the look into the ledger, for the budget")
        await lease_runs_out(desk, run_id)
        heir = await steps.claim(hint, desk.token())
        assert isinstance(heir, Claim)
        await steps.note_call(heir, 0.0, made=True)
        await lease_runs_out(desk, run_id)
        assert isinstance(await steps.claim(hint, desk.token()), Claim)
        [budget] = [one for use in await gate.settings.use() for one in use.budgets]
        lost = (await desk.stored(run_id)).result().lost_attempts
        await gate.aclose()
    assert [one.ambiguous for one in lost] == [False, True]
    assert budget.spent == 1
    assert budget.reserved == 1
