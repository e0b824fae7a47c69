"""The events of a run as typed records, also of an envelope. Pure; knows no transport."""

from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any, Literal, TypeVar

from pydantic import Field

from stepfleet.orchestrator.events.envelope import Event, EventType
from stepfleet.orchestrator.records.base import Record
from stepfleet.orchestrator.records.outcome import (
    ContinuationDecision,
    ContinuationEvaluation,
    ContinuationOutcome,
    StopReason,
)
from stepfleet.orchestrator.records.state import TERMINAL, Lifecycle
from stepfleet.orchestrator.records.usage import UsageStats

E = TypeVar("E", bound="DomainEvent")


class DomainEvent(Record):
    """One event. `agent_id` is the run's id, `timestamp` UTC."""

    agent_id: str
    parent_agent_id: str | None = None
    execution_id: str = ""
    timestamp: datetime


class AgentStepStarted(DomainEvent):
    """A step began. `message_count` is the length of its conversation."""

    step_number: int
    message_count: int = 0
    available_tools: tuple[str, ...] = ()


class AgentStepCompleted(DomainEvent):
    """A step was committed. `errors` are messages; `duration_ms` is monotonic time.

    `cached` says that the model's answer came from the response cache. Before the step it had
    waited for `waited_seconds`, for limits of the fleet. `refused` says why its answer was not
    taken by the answer contract.
    """

    step_number: int
    has_tool_calls: bool = False
    errors: tuple[str, ...] = ()
    finish_reason: str = ""
    usage: UsageStats | None = None
    duration_ms: float = 0.0
    cached: bool = False
    waited_seconds: float = 0.0
    waited_for: str = ""
    refused: str = ""


class ToolCallStarted(DomainEvent):
    """A tool call began. `args` is None where an envelope held only the summary."""

    tool: str
    tool_call_id: str
    args: dict[str, Any] | None = None
    args_summary: str = ""
    started_at: datetime


class ToolCallCompleted(DomainEvent):
    """A tool call ended; `error` is its message where it failed."""

    tool: str
    tool_call_id: str
    success: bool
    error: str | None = None
    started_at: datetime
    ended_at: datetime
    result_summary: str | None = None


class ContinuationEvaluated(DomainEvent):
    """The criteria were evaluated after a step."""

    step_number: int
    outcome: ContinuationOutcome

    def __str__(self) -> str:
        """Return the decision as a sentence."""
        verb = "CONTINUE" if self.outcome.should_continue else f"STOP ({self.outcome.stop_reason})"
        return f"agent {self.agent_id} step {self.step_number}: {verb}, {self.outcome.reason}"


class AgentStateUpdated(DomainEvent):
    """A run's state changed by a step, or from one status to another."""

    status: Lifecycle
    previous_status: Lifecycle | None = None
    step_count: int = 0


class AgentFinished(DomainEvent):
    """A run ended without an error: completed, stopped at a limit, or cancelled."""

    status: Lifecycle
    step_count: int = 0
    last_response: str | None = None


class AgentFailed(DomainEvent):
    """A run ended in error."""

    error: str | None = None
    step_count: int = 0
    last_response: str | None = None


class TokenUsageReported(DomainEvent):
    """A step used tokens; each token is reported once."""

    operation: Literal["llm_call", "tool_call", "step"] = "step"
    step_number: int
    usage: UsageStats = Field(default_factory=UsageStats)


def from_envelope(envelope: Mapping[str, Any]) -> tuple[DomainEvent, ...]:
    """Return the events of an envelope; none for types that serve display or retries."""
    event = Event(
        type=envelope["type"],
        session_id=envelope["session_id"],
        execution_id=envelope["execution_id"],
        timestamp=datetime.fromisoformat(envelope["timestamp"]),
        payload=envelope["payload"],
        parent_agent_id=envelope.get("parent_agent_id"),
    )
    return tuple(from_event(event))


def from_event(event: Event) -> Iterator[DomainEvent]:
    """Yield the same of an envelope that was built in this process."""
    payload, at = event.payload, event.timestamp
    match event.type:
        case EventType.STATUS:
            yield made(AgentStateUpdated, event)
            status = Lifecycle(payload["status"])
            if status is Lifecycle.FAILED:
                yield made(AgentFailed, event, error=payload["error_message"])
            elif status in TERMINAL:
                yield made(AgentFinished, event)
        case EventType.STEP_STARTED:
            yield made(AgentStepStarted, event)
        case EventType.STEP_COMPLETED:
            yield made(AgentStepCompleted, event)
            if payload["usage"]:
                yield made(TokenUsageReported, event)
        case EventType.TOOL_STARTED:
            yield made(ToolCallStarted, event, tool=payload["tool_name"], started_at=at)
        case EventType.TOOL_COMPLETED:
            started = at - timedelta(milliseconds=payload["duration_ms"] or 0)
            call = {"tool": payload["tool_name"], "started_at": started, "ended_at": at}
            yield made(ToolCallCompleted, event, **call)
        case EventType.CONTINUATION:
            yield made(ContinuationEvaluated, event, outcome=_outcome(payload))


def made(kind: type[E], event: Event, **more: Any) -> E:
    """Return a record of what an envelope holds: ids, time, and payload of the same names."""
    known = {
        **event.payload,
        "agent_id": event.session_id,
        "parent_agent_id": event.parent_agent_id,
        "execution_id": event.execution_id,
        "timestamp": event.timestamp,
        **more,
    }
    return kind(**{name: known[name] for name in kind.model_fields if name in known})


def _outcome(payload: Mapping[str, Any]) -> ContinuationOutcome:
    evaluations = tuple(ContinuationEvaluation(**one) for one in payload["evaluations"])
    goes_on, resolved_by = payload["should_continue"], payload["resolved_by"]
    default = (
        ContinuationDecision.REQUEST_CONTINUATION if goes_on else ContinuationDecision.ALLOW_STOP
    )
    resolving = (one.decision for one in evaluations if one.criterion == resolved_by)
    return ContinuationOutcome(
        decision=next(resolving, default),
        should_continue=goes_on,
        resolved_by=resolved_by,
        stop_reason=payload["stop_reason"] or StopReason.COMPLETED,
        evaluations=evaluations,
    )
