"""What calls of a step may have cost that came to nothing: in the ledger, results, and limits."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from support.runs.opened_runs import finish_with_waits, lease_runs_out
from support.runs.scripted_steps import Crash, Hands, call, say
from support.runs.stored_runs import Bench, bench
from support.runs.tools import look

from stepfleet.orchestrator import (
    LLM,
    Agent,
    AsyncFleet,
    LLMResponse,
    ModelRequest,
    ModelSettings,
    StopReason,
)
from stepfleet.orchestrator.errors import ModelTimeoutError
from stepfleet.orchestrator.protocol.attempt import Interruption
from stepfleet.worker.models import Models

FIRST, SECOND = "openai:dear", "openai:cheap"
PRICES = {"dear": {"input": 0, "output": 1000}, "cheap": {"input": 0, "output": 1}}
TOKENS = 40
COSTS = {"dear": TOKENS * 1000 / 1e6, "cheap": TOKENS * 1 / 1e6}
"""Of a call whose answer did not come: as many tokens as it was allowed to write."""


@dataclass
class Planned(LLM):
    """Does with each call of a model what is planned; from then on it answers."""

    plans: dict[str, list[str]]
    hands: list[Hands] = field(default_factory=list)
    made: Counter[str] = field(default_factory=Counter)

    async def generate(self, request: ModelRequest) -> LLMResponse:
        name = request.model.rpartition(":")[2]
        plan = self.plans.get(name, [])
        what = plan.pop(0) if plan else "answers"
        if what == "dies":
            self.made["dear"] += 1  # nobody knows its model: it counts as the call in its place
            raise Crash
        if what == "is cancelled":
            [lease] = self.hands[0].leases
            lease.interrupt(Interruption.CANCELLED)
            await asyncio.Event().wait()
        if what == "looks":
            return call(("look", {"what": "a"})).model_copy(update={"model": name})
        if what != "answers":
            self.made[name] += 1
            raise ModelTimeoutError("no answer")
        return say("fine").model_copy(update={"model": name})


CASES: dict[str, tuple[dict[str, list[str]], Any, StopReason]] = {
    "another model answers": ({"dear": ["hangs"]}, [FIRST, SECOND], StopReason.COMPLETED),
    "a retry answers": (
        {"dear": ["hangs", "hangs"], "cheap": ["hangs"]},
        [FIRST, SECOND],
        StopReason.COMPLETED,
    ),
    "one model is asked again and again": (
        {"dear": ["hangs", "hangs"]},
        [FIRST],
        StopReason.COMPLETED,
    ),
    "nobody answers": (
        {"dear": ["hangs"] * 9, "cheap": ["hangs"] * 9},
        [FIRST, SECOND],
        StopReason.ERROR,
    ),
    "its worker dies in the second call": (
        {"dear": ["hangs"], "cheap": ["dies"]},
        [FIRST, SECOND],
        StopReason.COMPLETED,
    ),
    "it is cancelled before it is tried again": (
        {"dear": ["hangs"], "cheap": ["hangs"]},
        [FIRST, SECOND],
        StopReason.USER_REQUESTED,
    ),
    "it is cancelled in the second call": (
        {"dear": ["hangs"], "cheap": ["is cancelled"]},
        [FIRST, SECOND],
        StopReason.USER_REQUESTED,
    ),
}


@pytest.mark.parametrize("case", CASES)
async def test_each_call_that_timed_out_has_the_price_of_its_own_model(
    redis_url: str, case: str
) -> None:
    """COST-09: the ledger, the results and the run's limits have the same sum."""
    plans, models, ends = CASES[case]
    model = Planned({name: list(plan) for name, plan in plans.items()})
    settings = ModelSettings(max_tokens=TOKENS)
    agent = Agent("listed", model=models, pricing=PRICES, settings=settings)
    async with bench(redis_url, agent, lease=600, grace=60) as desk, AsyncFleet(redis_url) as fleet:
        hands = Hands(desk, agent, models=Models(providers={"openai": lambda: model}))
        model.hands.append(hands)
        run_id = await desk.create()
        await bring_to_its_end(desk, hands, run_id, cancels="before it is tried again" in case)
        stored = await desk.stored(run_id)
        costs = await fleet.costs("model")
        lines = [line async for line in fleet.cost_lines(run_id)]
    result, rows = stored.result(), {row.group["model"]: row for row in costs.rows}
    assert result.stop_reason is ends
    assert model.made, "some calls have failed"
    for name, calls in model.made.items():
        assert rows[name].ambiguous_calls == calls
        assert float(rows[name].ambiguous_usd) == pytest.approx(calls * COSTS[name])
    assert costs.total.unpriced_calls == 0
    whole = float(costs.total.ambiguous_usd)
    assert result.lost_cost_usd == stored.state.lost.cost_usd == pytest.approx(whole)
    assert stored.state.lost.calls == costs.total.ambiguous_calls == len(result.lost_attempts)
    assert float(sum(line.usd or 0 for line in lines)) == pytest.approx(whole + result.cost_usd)


async def test_the_step_whose_own_failed_call_uses_the_budget_up_is_the_last(
    redis_url: str,
) -> None:
    """Its answer asks for more, and its commit decides: no further call is made."""
    model = Planned({"dear": ["hangs"] * 9, "cheap": ["looks"] * 9})
    settings = ModelSettings(max_tokens=TOKENS)
    agent = Agent(
        "listed",
        model=[FIRST, SECOND],
        pricing=PRICES,
        settings=settings,
        tools=[look],
        budget_usd=COSTS["dear"] * 0.9,
    )
    async with bench(redis_url, agent, lease=600, grace=60) as desk:
        hands = Hands(desk, agent, models=Models(providers={"openai": lambda: model}))
        run_id = await desk.create()
        await finish_with_waits(hands, run_id)
        result = (await desk.stored(run_id)).result()
    assert (result.stop_reason, len(result.steps)) == (StopReason.GUARD, 1)
    assert model.made == {"dear": 1}


async def bring_to_its_end(desk: Bench, hands: Hands, run_id: str, *, cancels: bool) -> None:
    try:
        await hands.step(run_id, 0)
    except Crash:
        await lease_runs_out(desk, run_id)
    if cancels:
        await desk.control.cancel(await desk.stored(run_id), "no more")
    await finish_with_waits(hands, run_id)
