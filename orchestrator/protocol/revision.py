"""Where an ended run is taken up again, and with which state. Pure.

A failed last step of the newest execution is taken back: its finished tools and, where the model
had answered, its answer go into the journal of the step that is done anew. A run that ended at a
limit, or before its turn's first step, goes on at its next step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from stepfleet.orchestrator.protocol.fold import rebuild
from stepfleet.orchestrator.records.errors import ErrorContext
from stepfleet.orchestrator.records.responses import LLMResponse
from stepfleet.orchestrator.records.run.results import LostAttempt
from stepfleet.orchestrator.records.state import AgentState
from stepfleet.orchestrator.records.steps import LoggedStep, StepType
from stepfleet.orchestrator.records.usage import UsageStats

_NOTHING = UsageStats()


@dataclass(frozen=True, slots=True)
class Revision:
    """The state before `step`, at which the run goes on (steps count from 0).

    `journal` is a flat list of field, value. `removed` and `removed_cost_usd` are what the
    step that was taken back had added to the run's sums.
    """

    step: int
    state: AgentState
    overrides: dict[str, Any] = field(default_factory=dict)
    journal: list[str] = field(default_factory=list)
    removed: UsageStats = _NOTHING
    removed_cost_usd: float = 0.0
    lost: LostAttempt | None = None


def revise(
    state: AgentState,
    log: Sequence[LoggedStep],
    overrides: Mapping[str, Any],
    now: datetime,
) -> Revision:
    """Return how the ended run with that state and log is taken up again.

    Where memory has trimmed the log, no step can be taken back: the run goes on behind the last.
    """
    if log and log[0].result.step > 1:
        info = state.info.model_copy(update={"updated_at": now, "execution_started_at": now})
        anew = state.model_copy(update={"info": info, "failures": ErrorContext.none()})
        return Revision(log[-1].result.step, anew, dict(overrides))
    fresh = state.reset().model_copy(update={"messages": ()})
    last = log[-1] if log and log[-1].execution == state.info.execution else None
    failed = last if last and last.result.type is StepType.ERROR else None
    kept = list(log[:-1]) if failed else list(log)
    rebuilt = rebuild(fresh, kept)
    while rebuilt.info.execution < state.info.execution:
        rebuilt = rebuilt.next_execution()
    info = rebuilt.info.model_copy(update={"updated_at": now, "execution_started_at": now})
    before = rebuilt.model_copy(update={"info": info, "failures": ErrorContext.none()})
    if failed is None:
        return Revision(len(kept), before, dict(overrides))
    return Revision(
        len(kept),
        before,
        dict(overrides),
        journal=_journal(failed),
        removed=failed.result.usage or UsageStats(),
        removed_cost_usd=failed.result.cost_usd,
        lost=LostAttempt(
            kind="retried",
            step=failed.result.step,
            seconds=failed.result.duration_ms / 1000,
            reason=failed.result.errors[0].message if failed.result.errors else None,
        ),
    )


def further_turn(
    state: AgentState, log: Sequence[LoggedStep], overrides: Mapping[str, Any], now: datetime
) -> Revision:
    """Return how an ended run goes on with a further turn: a new execution behind its log."""
    turn = state.next_execution()
    info = turn.info.at(now)
    step = log[-1].result.step if log else 0
    return Revision(step, turn.model_copy(update={"info": info}), dict(overrides))


def _was_misread(failed: LoggedStep) -> bool:
    """Return whether an answer without calls failed by what it meant: only a new one can help."""
    progress = failed.progress
    return progress is not None and progress.error is not None and not failed.result.tool_calls


def _journal(failed: LoggedStep) -> list[str]:
    """Return journal entries for what of a failed step need not be done again."""
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
        finish_reason=result.finish_reason,
        remembered=remembered,
        cache=result.cache,
    )
    entries += ["response", response.to_json()]
    for index, record in enumerate(result.tool_calls):
        if not record.is_error:
            entries += [f"r:{index}", record.to_json()]
    return entries
