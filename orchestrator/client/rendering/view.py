"""A run in one piece for a window: messages, error banner, stop reason. Pure."""

from collections.abc import Iterable
from typing import Any

from stepfleet.orchestrator.client.rendering.messages import UIMessage
from stepfleet.orchestrator.records.base import Record
from stepfleet.orchestrator.records.outcome import ContinuationOutcome, StopReason
from stepfleet.orchestrator.records.run.facts import RunFacts
from stepfleet.orchestrator.records.state import Lifecycle
from stepfleet.orchestrator.records.usage import UsageStats


class ErrorBanner(Record):
    """The error of a failed run; `step` is from 1, where one has failed."""

    message: str
    type: str | None = None
    code: str | None = None
    retryable: bool = False
    step: int | None = None
    tool_name: str | None = None


class RunView(Record):
    """A run for display. `continuation` is the newest decision, with all evaluations."""

    run_id: str
    agent_name: str
    status: Lifecycle
    stop_reason: StopReason | None = None
    steps: int = 0
    usage: UsageStats = UsageStats()
    cost_usd: float = 0.0
    messages: tuple[UIMessage, ...] = ()
    banner: ErrorBanner | None = None
    continuation: ContinuationOutcome | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the view as plain JSON-ready data."""
        return {**super().to_dict(), "messages": [one.to_dict() for one in self.messages]}


def view_of(facts: RunFacts, messages: Iterable[UIMessage]) -> RunView:
    """Return the view of a run with that history."""
    return RunView(
        run_id=facts.run_id,
        agent_name=facts.agent_name,
        status=facts.lifecycle,
        stop_reason=facts.stop_reason,
        steps=facts.steps_used,
        usage=facts.usage,
        cost_usd=facts.cost_usd,
        messages=tuple(messages),
        banner=_banner(facts),
        continuation=facts.outcome,
    )


def _banner(facts: RunFacts) -> ErrorBanner | None:
    if facts.error is None:
        return None
    failure = facts.last_failure
    if failure is None:
        return ErrorBanner(message=facts.error)
    return ErrorBanner(
        message=facts.error,
        type=failure.type.value,
        code=failure.code,
        retryable=failure.retryable,
        step=facts.steps[-1].step,
        tool_name=failure.tool_name,
    )
