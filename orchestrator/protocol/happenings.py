"""Which events a commit tells: the step, its tools, and the run's change of status."""

from datetime import timedelta
from typing import Any

from stepfleet.orchestrator.events import Event, Events, EventType, args_summary, result_summary
from stepfleet.orchestrator.protocol.attempt import Attempt
from stepfleet.orchestrator.protocol.claim import Claim
from stepfleet.orchestrator.protocol.verdict import Facts, Move, Verdict
from stepfleet.orchestrator.records.results import end_state
from stepfleet.orchestrator.records.state import Lifecycle
from stepfleet.orchestrator.records.steps import StepResult


def events_of(claim: Claim, attempt: Attempt, verdict: Verdict, facts: Facts) -> Events:
    """Return the events of one commit, in the order in which they happened."""
    told: list[Event] = []
    if claim.state.session_steps == 0 and claim.attempts + claim.limited + claim.crashes == 0:
        told.append(_status(claim, verdict, Lifecycle.IN_PROGRESS, claim.now))
    if verdict.logged:
        told += _step(claim, verdict.logged.result, facts)
    if verdict.move is Move.RETRY and verdict.failure:
        payload = {
            "step_number": claim.number,
            "error": verdict.failure.message,
            "attempt": claim.attempts + claim.limited + 1,
            "retry_in_seconds": round(verdict.delay, 3),
            "duration_ms": round(attempt.span.seconds * 1000, 3),
        }
        told.append(_event(claim, EventType.STEP_RETRIED, facts.now, payload))
    if verdict.move is Move.FINISH and verdict.stop_reason:
        told.append(_status(claim, verdict, end_state(verdict.stop_reason), facts.now))
    return Events(told)


def _step(claim: Claim, result: StepResult, facts: Facts) -> list[Event]:
    started = {
        "step_number": result.step,
        "message_count": len(claim.state.messages),
        "available_tools": [tool.name for tool in claim.config.tools],
    }
    told = [_event(claim, EventType.STEP_STARTED, result.started_at, started)]
    for call in result.tool_calls:
        base = {"tool_name": call.tool_name, "tool_call_id": call.call_id}
        summary = {**base, "args_summary": args_summary(call.arguments)}
        told.append(_event(claim, EventType.TOOL_STARTED, call.timestamp, summary))
        ended = call.timestamp + timedelta(milliseconds=call.duration_ms or 0)
        completed: dict[str, Any] = {
            **base,
            "success": not call.is_error,
            "error": call.error.message if call.error else None,
            "duration_ms": call.duration_ms,
            "result_summary": result_summary(call.result),
        }
        told.append(_event(claim, EventType.TOOL_COMPLETED, ended, completed))
    summary_of_step: dict[str, Any] = {
        "step_number": result.step,
        "has_tool_calls": result.has_tool_calls,
        "errors": [error.message for error in result.errors],
        "finish_reason": result.finish_reason.value,
        "usage": result.usage.to_dict() if result.usage else None,
        "duration_ms": round(result.duration_ms, 3),
    }
    return [*told, _event(claim, EventType.STEP_COMPLETED, facts.now, summary_of_step)]


def _status(claim: Claim, verdict: Verdict, status: Lifecycle, at: Any) -> Event:
    payload = {
        "status": status.value,
        "step_count": verdict.state.step_count,
        "error_message": verdict.error,
        "last_response": verdict.state.last_output,
    }
    return _event(claim, EventType.STATUS, at, payload)


def _event(claim: Claim, kind: EventType, at: Any, payload: dict[str, Any]) -> Event:
    return Event(kind, claim.run_id, claim.state.info.execution_id, at, payload)
