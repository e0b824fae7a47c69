"""What the calls of a step spend of budgets, by the prices of the ledger. Pure but for prices."""

from collections.abc import Callable, Iterable

from stepfleet.orchestrator.agents.config import AgentConfig
from stepfleet.orchestrator.limits.budgets import NOTHING, Spending, spending_of
from stepfleet.orchestrator.limits.estimates import Amounts
from stepfleet.orchestrator.models.pricing import Cost, stated_cost
from stepfleet.orchestrator.models.pricing.prices import address_of, tier_of
from stepfleet.orchestrator.protocol.claim import Claim
from stepfleet.orchestrator.protocol.verdict import Verdict
from stepfleet.orchestrator.records.ledger import bare_name
from stepfleet.orchestrator.records.memory_window import Remembered
from stepfleet.orchestrator.records.run.results import LostAttempt
from stepfleet.orchestrator.records.usage import Spent, UsageStats, bounded_cost, sum_usd
from stepfleet.worker.attempt.usage import usage_of

Price = Callable[[AgentConfig, str, UsageStats], float]
"""The price of a call in USD, by its agent, model and usage."""


def price_by(cost: Cost) -> Price:
    """Return what prices calls: by what the agent states, else by the worker's table.

    In the tier that the agent asks for: the answer is still to come.
    """

    def price(config: AgentConfig, model: str, usage: UsageStats) -> float:
        tier = tier_of(config.settings.service_tier)
        stated = stated_cost(config.pricing, (model,), usage, tier) if config.pricing else None
        if stated is None:
            address = address_of(model, config.settings.base_url)
            stated = cost(model, usage, tier, address)
        return bounded_cost(stated)

    return price


def spent_in(
    claim: Claim, verdict: Verdict, reserved: Spending, *, has_summary: bool = False
) -> Spending:
    """Return what a step's calls have spent, as the ledger has it; without its time.

    A call that was sent, and of which nothing is known, counts as it was `reserved`. With
    `has_summary` that of the step is paid for.
    """
    result = verdict.logged.result if verdict.logged else None
    spent = NOTHING
    if result is not None and result.usage is not None:
        usage, usd = result.usage, result.cost_usd
        remembered = verdict.logged.remembered if verdict.logged else None
        if has_summary and remembered and (summary := remembered.summary):
            usage, usd = usage - summary.usage, sum_usd(usd, -summary.cost_usd)
        spent = spending_of(usage, usd)
    lost = () if claim.journal.response is not None or verdict.lost is None else (verdict.lost,)
    return spent + spent_in_vain((*lost, *verdict.failed), reserved)


def spent_in_vain(losses: Iterable[LostAttempt], reserved: Spending) -> Spending:
    """Return what calls have spent that came to nothing, by their entries of the ledger."""
    spent = NOTHING
    for one in losses:
        if one.tokens:
            spent += _of_lost(one)
        elif one.ambiguous:
            spent += reserved
    return spent


def spent_by_answer(price: LostAttempt | None, remembered: Remembered | None) -> Spending:
    """Return what an answer has spent that is journaled with its price, and a step's memory."""
    spent = _of_lost(price) if price else NOTHING
    summary = remembered.summary if remembered else None
    return spent + spending_of(summary.usage, summary.cost_usd) if summary else spent


def expected(config: AgentConfig, amounts: Amounts, price: Price) -> tuple[Spent, ...]:
    """Return what lost calls of a step may have cost, where nobody may ever repeat it.

    By the estimate of the call in their place, one for each model of the agent.
    """
    usage = usage_of(amounts.input_tokens, amounts.output_tokens)
    return tuple(
        Spent(usage.total_tokens, price(config, model, usage), usage=usage, model=bare_name(model))
        for model in config.models
    )


def _of_lost(lost: LostAttempt) -> Spending:
    usage = lost.usage or UsageStats(prompt_tokens=lost.tokens)
    calls = usage.model_copy(update={"llm_calls": max(usage.llm_calls, 1)})
    return spending_of(calls, lost.cost_usd or 0.0)
