"""The domain events of one commit, from its own records: whole arguments and outcomes. Pure."""

from collections.abc import Iterator
from datetime import datetime
from typing import Any

from stepfleet.orchestrator.events.domain_events import (
    AgentFailed,
    AgentFinished,
    AgentStateUpdated,
    AgentStepCompleted,
    ContinuationEvaluated,
    DomainEvent,
    ToolCallStarted,
    from_envelope,
)
from stepfleet.orchestrator.events.envelope import Events, EventType
from stepfleet.orchestrator.protocol.claim import Claim
from stepfleet.orchestrator.protocol.verdict import Verdict
from stepfleet.orchestrator.records.state import Lifecycle


def from_commit(claim: Claim, verdict: Verdict, events: Events) -> tuple[DomainEvent, ...]:
    """Return what a commit tells, in order: the step, its tools, its evaluation, the new state."""
    return tuple(_in_order(claim, verdict, events))


def _in_order(claim: Claim, verdict: Verdict, events: Events) -> Iterator[DomainEvent]:
    ends: list[DomainEvent] = []
    for event in events:
        if event.type is EventType.CONTINUATION:
            continue
        for told in from_envelope(event.to_dict()):
            if isinstance(told, ToolCallStarted):
                yield told.model_copy(update={"args": _arguments(verdict, told.tool_call_id)})
            elif isinstance(told, AgentFinished | AgentFailed):
                ends.append(told)
            elif not isinstance(told, AgentStateUpdated):
                yield told
            if isinstance(told, AgentStepCompleted) and verdict.outcome:
                head = _head(claim, told.timestamp)
                number = told.step_number
                yield ContinuationEvaluated(**head, step_number=number, outcome=verdict.outcome)
    if verdict.logged or ends:
        at = events[-1].timestamp if events else claim.now
        yield AgentStateUpdated(
            **_head(claim, at),
            status=_status(ends),
            previous_status=Lifecycle.IN_PROGRESS,
            step_count=verdict.state.step_count,
        )
    yield from ends


def _status(ends: list[DomainEvent]) -> Lifecycle:
    for end in ends:
        return end.status if isinstance(end, AgentFinished) else Lifecycle.FAILED
    return Lifecycle.IN_PROGRESS


def _arguments(verdict: Verdict, call_id: str) -> dict[str, Any] | None:
    calls = verdict.logged.result.tool_calls if verdict.logged else ()
    return next((call.arguments for call in calls if call.call_id == call_id), None)


def _head(claim: Claim, at: datetime) -> dict[str, Any]:
    state = claim.state
    return {
        "agent_id": claim.run_id,
        "parent_agent_id": state.parent_agent_id,
        "execution_id": state.info.execution_id,
        "timestamp": at,
    }
