"""The state from which an ended run is resumed, or in which it was before a step. Pure.

A retry takes back a failed last step of the newest execution: its finished tools and, where the
model had answered, its answer go into the journal of the step that is repeated. A run that ended at
a limit, or before the first step of its execution, goes on at its next step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from stepfleet.orchestrator.agents.config import (
    AgentConfig,
    limits_of,
    merged_overrides,
    read_overrides,
)
from stepfleet.orchestrator.protocol.claim import Claim
from stepfleet.orchestrator.protocol.fold import rebuild
from stepfleet.orchestrator.protocol.lost_attempts import because, lost_use
from stepfleet.orchestrator.records.calls.tools import (
    NOT_EXECUTED,
    ToolCall,
    ToolCallRecord,
    refused,
)
from stepfleet.orchestrator.records.errors import ErrorContext
from stepfleet.orchestrator.records.responses import LLMResponse
from stepfleet.orchestrator.records.run.results import LostAttempt, LostKind
from stepfleet.orchestrator.records.state import AgentState
from stepfleet.orchestrator.records.steps import HandedOver, LoggedStep, RunAgent, StepType
from stepfleet.orchestrator.records.usage import UsageStats

LONGEST_REASON = 1000


@dataclass(frozen=True, slots=True)
class Transfer:
    """The call at `index` hands over to the agent `to`; `others` are the calls that come too late.

    `target` is that agent's stored configuration, once it is known.
    """

    index: int
    to: str
    others: tuple[int, ...] = ()
    target: AgentConfig | None = None


def transfer_in(calls: Sequence[ToolCall], targets: Mapping[str, str]) -> Transfer | None:
    """Return the transfer of a response; `targets` are the agents by the names of the tools."""
    found = [at for at, call in enumerate(calls) if call.name in targets and call.error is None]
    if not found:
        return None
    first, *others = found
    return Transfer(first, targets[calls[first].name], tuple(others))


def too_late(call: ToolCall, to: str, at: datetime) -> ToolCallRecord:
    """Return the record of a transfer after the first one of its response: no failure."""
    message = f"not done: an earlier call of this response hands over to agent {to}"
    return refused(call, at, code=NOT_EXECUTED, message=message)


def handed_over(
    claim: Claim, transfer: Transfer | None, record: ToolCallRecord | None
) -> HandedOver | None:
    """Return the hand-off that a turn makes; None where the call has failed, or not been made."""
    if transfer is None or transfer.target is None or record is None or record.is_error:
        return None
    config, target = claim.config, transfer.target
    reason = record.arguments.get("reason")
    return HandedOver(
        by=RunAgent(
            name=config.name,
            config=claim.config_digest,
            overrides=read_overrides(claim.overrides),
        ),
        to=RunAgent(
            name=target.name,
            config=target.digest,
            overrides=limits_of(config, unlike=target),
        ),
        reason=reason[:LONGEST_REASON] if isinstance(reason, str) else "",
        trims=config.memory.trim_log,
    )


def agent_before(log: Sequence[LoggedStep], step: int) -> RunAgent | None:
    """Return whose step `step` (from 0) is; None where no other agent has the run since."""
    later = (one.handoff for one in log if one.handoff and one.result.step > step)
    return next((one.by for one in later), None)


def overrides_of(agent: RunAgent, config: AgentConfig) -> dict[str, object]:
    """Return the overrides of a run that goes back to an agent, with the limits that it has now."""
    return merged_overrides(agent.overrides, limits_of(config))


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
    return LostAttempt.model_construct(
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
