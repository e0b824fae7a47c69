"""A call that waited for another run, or for a person, and has its answer. Pure."""

from datetime import datetime

from stepfleet.orchestrator.events.envelope import Event, EventType
from stepfleet.orchestrator.protocol.claim import Work
from stepfleet.orchestrator.records.calls.answers import Answer, Decision, RunEnd
from stepfleet.orchestrator.records.calls.tools import DENIED, ToolCall, ToolCallRecord, refused
from stepfleet.orchestrator.records.run.results import RunStatus

RUN_FAILED = "RUN_FAILED"


def answered(call: ToolCall, answer: Answer, at: datetime) -> ToolCallRecord | None:
    """Return the record of a call with that answer; None where the call may be made now."""
    if answer.run is not None:
        return _of_run(call, answer.run, at)
    if answer.decision is not None:
        return _of_decision(call, answer.decision, at)
    return None


def decided_event(
    hint: Work, execution: int, call: ToolCall, decision: Decision, at: datetime
) -> Event:
    """Return the event of a call's decision."""
    payload = {
        "step_number": hint.step + 1,
        "tool_name": call.name,
        "tool_call_id": call.id,
        "approved": decision.approved,
        "by": decision.by,
        "reason": decision.reason,
        "by_default": decision.by_default,
    }
    return Event(EventType.DECIDED, hint.run_id, f"{hint.run_id}:{execution}", at, payload)


def _of_run(call: ToolCall, end: RunEnd, at: datetime) -> ToolCallRecord:
    bare = end.model_copy(update={"output": None})
    if end.status != RunStatus.COMPLETED:
        why = f": {end.error}" if end.error else ""
        started = f"run {end.run_id} of agent {end.agent!r} ended as {end.stop_reason}{why}"
        message = started if end.run_id else f"no run of agent {end.agent!r} was started{why}"
        record = refused(call, at, code=RUN_FAILED, message=message)
        return record.model_copy(update={"run": bare}) if end.run_id else record
    text = end.output or ""
    if end.cut:
        text += f"\n[{end.cut:,} more characters: see run {end.run_id}]"
    return _result(call, text, at).model_copy(update={"run": bare})


def _of_decision(call: ToolCall, decision: Decision, at: datetime) -> ToolCallRecord | None:
    if not decision.approved:
        by = decision.by or "the time limit"
        reason = f": {decision.reason}" if decision.reason else ""
        record = refused(call, at, code=DENIED, message=f"denied by {by}{reason}")
    elif decision.text is not None:
        record = _result(call, decision.text, at)
    else:
        return None
    return record.model_copy(update={"decision": decision})


def _result(call: ToolCall, text: str, at: datetime) -> ToolCallRecord:
    return ToolCallRecord(
        tool_name=call.name,
        call_id=call.id,
        arguments=call.arguments,
        result=text,
        duration_ms=0.0,
        timestamp=at,
    )
