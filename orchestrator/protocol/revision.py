"""The state from which an ended run is resumed, or in which it was before a step. Pure.

A retry takes back a failed last step of the newest execution: its finished tools and, where the
model had answered, its answer go into the journal of the step that is repeated. A run that ended at
a limit, or before the first step of its execution, goes on at its next step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from stepfleet.orchestrator.protocol.fold import rebuild
from stepfleet.orchestrator.protocol.lost_attempts import because, lost_use
from stepfleet.orchestrator.records.errors import ErrorContext
from stepfleet.orchestrator.records.responses import LLMResponse
from stepfleet.orchestrator.records.run.results import LostAttempt, LostKind
from stepfleet.orchestrator.records.state import AgentState
from stepfleet.orchestrator.records.steps import LoggedStep, StepType
from stepfleet.orchestrator.records.usage import UsageStats

_NOTHING = UsageStats()


@dataclass(frozen=True, slots=True)
class Revision:
    """The state before `step`, at which the run goes on (steps count from 0).

    `journal` is a flat list of field, value. `removed` and `removed_cost_usd` are what the
    step that was `taken_back` had added to the run's sums.
    """

    step: int
    state: AgentState
    overrides: dict[str, Any] = field(default_factory=dict)
    journal: list[str] = field(default_factory=list)
    removed: UsageStats = _NOTHING
    removed_cost_usd: float = 0.0
    lost: LostAttempt | None = None
    taken_back: LoggedStep | None = None

    @property
    def is_handoff(self) -> bool:
        """Whether the run goes back to the agent that it had before the step `taken_back`."""
        return self.taken_back is not None and self.taken_back.handoff is not None


def revise(
    state: AgentState,
    log: Sequence[LoggedStep],
    overrides: Mapping[str, Any],
    now: datetime,
) -> Revision:
    """Return how the ended run with that state and log is resumed.

    Where memory has trimmed the log, no step can be taken back: the run goes on after the last.
    """
    if log and log[0].result.step > 1:
        return Revision(log[-1].result.step, _resumed(state, now), dict(overrides))
    last = log[-1] if log and log[-1].execution == state.info.execution else None
    failed = last if last and last.result.type is StepType.ERROR else None
    step = len(log) - 1 if failed else len(log)
    before = _resumed(state_before(state, log, step), now)
    before = before.model_copy(update={"lost": state.lost, "session_lost": state.session_lost})
    if failed is None:
        return Revision(step, before, dict(overrides))
    lost = LostAttempt(
        kind=LostKind.RETRIED,
        step=failed.result.step,
        seconds=failed.result.duration_ms / 1000,
        **because(failed.result.errors[0] if failed.result.errors else None),
        **_paid_in_vain(failed),
    )
    return Revision(
        step,
        before.with_lost(lost_use((lost,))),
        dict(overrides),
        journal=_journal(failed),
        removed=failed.result.usage or UsageStats(),
        removed_cost_usd=failed.result.cost_usd,
        lost=lost,
        taken_back=failed,
    )


def price_of(
    step: int, usage: UsageStats | None, cost: float, model: str, tier: str = ""
) -> LostAttempt:
    """Return the entry for a journaled answer of `step` (from 1) that is not used in the end."""
    return LostAttempt(
        kind=LostKind.INTERRUPTED,
        step=step,
        tokens=usage.total_tokens if usage else 0,
        cost_usd=cost,
        model=model or None,
        usage=usage,
        service_tier=tier,
    )


def further_turn(
    state: AgentState, log: Sequence[LoggedStep], overrides: Mapping[str, Any], now: datetime
) -> Revision:
    """Return how an ended run goes on with a new execution after its log."""
    following = state.next_execution()
    step = log[-1].result.step if log else 0
    state = following.model_copy(update={"info": following.info.at(now)})
    return Revision(step, state, dict(overrides))


def state_before(state: AgentState, log: Sequence[LoggedStep], at: int) -> AgentState:
    """Return the state before step `at` (from 0) of the run that has `state` and `log` now.

    Its messages are those that the steps have added; the run's inputs are kept apart.
    """
    fresh = state.reset().model_copy(update={"messages": ()})
    rebuilt = rebuild(fresh, log[:at])
    execution = log[at].execution if at < len(log) else state.info.execution
    while rebuilt.info.execution < execution:
        rebuilt = rebuilt.next_execution()
    return rebuilt


def renamed(state: AgentState, run_id: str) -> AgentState:
    """Return the state as that of a run with another id."""
    execution_id = f"{run_id}:{state.info.execution}"
    info = state.info.model_copy(update={"id": run_id, "execution_id": execution_id})
    return state.model_copy(update={"agent_id": run_id, "info": info})


def _resumed(state: AgentState, now: datetime) -> AgentState:
    info = state.info.model_copy(update={"updated_at": now, "execution_started_at": now})
    return state.model_copy(update={"info": info, "failures": ErrorContext.none()})


def _own_part(failed: LoggedStep) -> tuple[UsageStats, float]:
    """Return tokens and cost of a step without those of a summary."""
    usage, cost = failed.result.usage or _NOTHING, failed.result.cost_usd
    summary = failed.remembered.summary if failed.remembered else None
    return (usage - summary.usage, cost - summary.cost_usd) if summary else (usage, cost)


def _paid_in_vain(failed: LoggedStep) -> dict[str, Any]:
    """Return the price of an answer that is not used again."""
    usage, cost = _own_part(failed)
    if (failed.messages and not _was_misread(failed)) or not usage.llm_calls:
        return {}
    return {
        "tokens": usage.total_tokens,
        "cost_usd": cost,
        "model": failed.result.model,
        "service_tier": failed.result.service_tier,
        "usage": usage,
        "estimated": failed.result.usage_estimated,
        "default_priced": bool(failed.default_priced),
    }


def _was_misread(failed: LoggedStep) -> bool:
    """Return whether an answer without calls was invalid by its content: only a new one helps."""
    progress = failed.progress
    return progress is not None and progress.error is not None and not failed.result.tool_calls


def _journal(failed: LoggedStep) -> list[str]:
    """Return journal entries for the parts of a failed step that need not be repeated."""
    remembered = failed.remembered
    summary = remembered.summary if remembered else None
    entries = ["memory", remembered.to_json()] if remembered and summary else []
    if not failed.messages or _was_misread(failed):
        return entries
    result = failed.result
    usage = result.usage if result.usage_reported or result.usage_estimated else None
    response = LLMResponse(
        content=failed.messages[0].text,
        tool_calls=failed.messages[0].tool_calls or None,
        usage=usage - summary.usage if usage and summary else usage,
        usage_estimated=result.usage_estimated,
        model=result.model or "",
        service_tier=result.service_tier,
        finish_reason=result.finish_reason,
        reasoning=failed.messages[0].reasoning,
        remembered=remembered,
        cache=result.cache,
        fallback=result.fallback,
    )
    entries += ["response", response.to_json()]
    if not result.cached:
        usage, cost = _own_part(failed)
        price = price_of(result.step, usage, cost, response.model, result.service_tier)
        entries += ["price", price.to_json()]
    for index, record in enumerate(result.tool_calls):
        if not record.is_error:
            entries += [f"r:{index}", record.to_json()]
    return entries
