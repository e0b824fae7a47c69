"""A run's end in short, for whoever asks why it is as it is. Knows no presentation beyond text."""

from stepfleet.orchestrator.records.base import Record
from stepfleet.orchestrator.records.endings import RunStatus
from stepfleet.orchestrator.records.errors import ErrorInfo
from stepfleet.orchestrator.records.outcome import StopReason
from stepfleet.orchestrator.records.run_facts import RunFacts
from stepfleet.orchestrator.records.state import Lifecycle
from stepfleet.orchestrator.records.steps import FinishReason
from stepfleet.orchestrator.records.usage import UsageStats


class StepErrors(Record):
    """What went wrong in a step."""

    step: int
    errors: tuple[ErrorInfo, ...]


class DebugSummary(Record):
    """What a run came to. `finish_reason` is that of the last step; costs are in USD."""

    run_id: str
    agent_name: str
    lifecycle: Lifecycle
    status: RunStatus | None = None
    steps: int = 0
    max_iterations: int
    stop_reason: StopReason | None = None
    resolved_by: str | None = None
    reason: str | None = None
    errors: tuple[StepErrors, ...] = ()
    finish_reason: FinishReason | None = None
    usage: UsageStats = UsageStats()
    cost_usd: float = 0.0
    lost_attempts: int = 0

    def __str__(self) -> str:
        """Return a line per field, and one per error."""
        ended = self.status or self.lifecycle
        why = f"{self.stop_reason or 'not stopped'}, resolved by {self.resolved_by or 'nothing'}"
        usage = self.usage
        used = f"{usage.total_tokens} tokens, {usage.llm_calls} calls, {self.cost_usd:.6f} USD"
        if usage.cached_calls:
            used += f", {usage.cached_calls} cached"
        lines = [
            f"run {self.run_id} of {self.agent_name}: {ended}",
            f"steps: {self.steps} of {self.max_iterations}, lost attempts: {self.lost_attempts}",
            f"stop reason: {why}" + (f": {self.reason}" if self.reason else ""),
            f"finish reason: {self.finish_reason or 'none'}",
            f"usage: {used}",
        ]
        lines += [
            f"error in step {failed.step}: {one.type.value} ({one.code}): {one.message}"
            for failed in self.errors
            for one in failed.errors
        ]
        return "\n".join(lines)


def debugged(facts: RunFacts) -> DebugSummary:
    """Return the summary of a run."""
    outcome = facts.outcome
    return DebugSummary(
        run_id=facts.run_id,
        agent_name=facts.agent_name,
        lifecycle=facts.lifecycle,
        status=facts.status,
        steps=facts.steps_used,
        max_iterations=facts.max_iterations,
        stop_reason=facts.stop_reason,
        resolved_by=outcome.resolved_by if outcome else None,
        reason=facts.error or (outcome.reason if outcome else None),
        errors=tuple(
            StepErrors(step=step.step, errors=step.errors) for step in facts.steps if step.errors
        ),
        finish_reason=facts.steps[-1].finish_reason if facts.steps else None,
        usage=facts.usage,
        cost_usd=facts.cost_usd,
        lost_attempts=len(facts.lost_attempts),
    )
