"""What happened in a run as typed records: for code that listens, in any process.

Made of envelopes, or with more detail of a commit's own records. Pure; knows no transport.
"""

from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any, Literal

from pydantic import Field

from stepfleet.orchestrator.events.envelope import EventType
from stepfleet.orchestrator.records.base import Record
from stepfleet.orchestrator.records.outcome import (
    ContinuationDecision,
    ContinuationEvaluation,
    ContinuationOutcome,
    StopReason,
)
from stepfleet.orchestrator.records.state import TERMINAL, Lifecycle
from stepfleet.orchestrator.records.usage import UsageStats


class DomainEvent(Record):
    """One thing that happened. `agent_id` is the run's id, `timestamp` UTC."""

    agent_id: str
    parent_agent_id: str | None = None
    execution_id: str = ""
    timestamp: datetime


class AgentStepStarted(DomainEvent):
    """A step began, with so many messages in its conversation."""

    step_number: int
    message_count: int = 0
    available_tools: tuple[str, ...] = ()


class AgentStepCompleted(DomainEvent):
    """A step was committed. `errors` are messages; `duration_ms` is monotonic time.

    `cached` says that the model's answer came from the response cache.
    """

    step_number: int
    has_tool_calls: bool = False
    errors: tuple[str, ...] = ()
    finish_reason: str = ""
    usage: UsageStats | None = None
    duration_ms: float = 0.0
    cached: bool = False


class ToolCallStarted(DomainEvent):
    """A tool call began. `args` are None where only their summary was told."""

    tool: str
    tool_call_id: str
    args: dict[str, Any] | None = None
    args_summary: str = ""
    started_at: datetime


class ToolCallCompleted(DomainEvent):
    """A tool call came to its end; `error` is its message where it failed."""

    tool: str
    tool_call_id: str
    success: bool
    error: str | None = None
    started_at: datetime
    ended_at: datetime
    result_summary: str | None = None


class ContinuationEvaluated(DomainEvent):
    """The criteria were evaluated behind a step."""

    step_number: int
    outcome: ContinuationOutcome

    def __str__(self) -> str:
        """Return the decision as a person reads it."""
        word = "CONTINUE" if self.outcome.should_continue else f"STOP ({self.outcome.stop_reason})"
        return f"agent {self.agent_id} step {self.step_number}: {word}, {self.outcome.reason}"


class AgentStateUpdated(DomainEvent):
    """A run's state changed: by a step, or from one status to another."""

    status: Lifecycle
    previous_status: Lifecycle | None = None
    step_count: int = 0


class AgentFinished(DomainEvent):
    """A run came to its end without an error: completed, stopped at a limit, or cancelled."""

    status: Lifecycle
    step_count: int = 0
    last_response: str | None = None


class AgentFailed(DomainEvent):
    """A run ended in error."""

    error: str | None = None
    step_count: int = 0
    last_response: str | None = None


class TokenUsageReported(DomainEvent):
    """Tokens were used: by a whole step, each told once."""

    operation: Literal["llm_call", "tool_call", "step"] = "step"
    step_number: int
    usage: UsageStats = Field(default_factory=UsageStats)


def from_envelope(envelope: Mapping[str, Any]) -> tuple[DomainEvent, ...]:
    """Return what an envelope tells; nothing for types that are about display or retries."""
    head = {
        "agent_id": envelope["session_id"],
        "parent_agent_id": envelope.get("parent_agent_id"),
        "execution_id": envelope["execution_id"],
        "timestamp": datetime.fromisoformat(envelope["timestamp"]),
    }
    return tuple(_events(envelope["type"], envelope["payload"], head))


def _events(kind: str, told: Mapping[str, Any], head: dict[str, Any]) -> Iterator[DomainEvent]:
    match kind:
        case EventType.STATUS:
            yield from _status(told, head)
        case EventType.STEP_STARTED:
            yield AgentStepStarted(**head, **_known(told, AgentStepStarted))
        case EventType.STEP_COMPLETED:
            yield AgentStepCompleted(**head, **_known(told, AgentStepCompleted))
            if told["usage"]:
                usage = UsageStats.model_validate(told["usage"])
                yield TokenUsageReported(**head, step_number=told["step_number"], usage=usage)
        case EventType.TOOL_STARTED:
            names = {"tool": told["tool_name"], "started_at": head["timestamp"]}
            yield ToolCallStarted(**head, **names, **_known(told, ToolCallStarted))
        case EventType.TOOL_COMPLETED:
            ended = head["timestamp"]
            started = ended - timedelta(milliseconds=told["duration_ms"] or 0)
            names = {"tool": told["tool_name"], "started_at": started, "ended_at": ended}
            yield ToolCallCompleted(**head, **names, **_known(told, ToolCallCompleted))
        case EventType.CONTINUATION:
            number = told["step_number"]
            yield ContinuationEvaluated(**head, step_number=number, outcome=_outcome(told))


def _status(told: Mapping[str, Any], head: dict[str, Any]) -> Iterator[DomainEvent]:
    status = Lifecycle(told["status"])
    yield AgentStateUpdated(**head, **_known(told, AgentStateUpdated))
    if status is Lifecycle.FAILED:
        yield AgentFailed(**head, error=told["error_message"], **_known(told, AgentFailed))
    elif status in TERMINAL:
        yield AgentFinished(**head, **_known(told, AgentFinished))


def _known(told: Mapping[str, Any], record: type[DomainEvent]) -> dict[str, Any]:
    """Return what of a payload has the same name in the record."""
    return {name: value for name, value in told.items() if name in record.model_fields}


def _outcome(told: Mapping[str, Any]) -> ContinuationOutcome:
    evaluations = tuple(ContinuationEvaluation(**one) for one in told["evaluations"])
    resolving = [one.decision for one in evaluations if one.criterion == told["resolved_by"]]
    goes_on = told["should_continue"]
    default = (
        ContinuationDecision.REQUEST_CONTINUATION if goes_on else ContinuationDecision.ALLOW_STOP
    )
    return ContinuationOutcome(
        decision=resolving[0] if resolving else default,
        should_continue=goes_on,
        resolved_by=told["resolved_by"],
        stop_reason=StopReason(told["stop_reason"])
        if told["stop_reason"]
        else StopReason.COMPLETED,
        evaluations=evaluations,
    )
