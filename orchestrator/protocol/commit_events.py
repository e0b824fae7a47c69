"""The events of one commit: the step, its tools, its evaluations, the end of the run. Pure.

Scripts that change a run's status by themselves publish that change.
"""

from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any

from stepfleet.orchestrator.events.domain_events import (
    AgentFailed,
    AgentFinished,
    AgentStateUpdated,
    AgentStepCompleted,
    ContinuationEvaluated,
    DomainEvent,
    ToolCallStarted,
    from_event,
    made,
)
from stepfleet.orchestrator.events.envelope import (
    Event,
    Events,
    EventType,
    args_shown,
    args_summary,
    result_summary,
    stamp,
    status_payload,
)
from stepfleet.orchestrator.events.subscribers import BroadcastConfig
from stepfleet.orchestrator.protocol.attempt import Attempt, Parked
from stepfleet.orchestrator.protocol.claim import Claim
from stepfleet.orchestrator.protocol.verdict import Facts, Move, Verdict
from stepfleet.orchestrator.protocol.waiting import Waiting
from stepfleet.orchestrator.records.calls.answers import Awaited, awaited_by
from stepfleet.orchestrator.records.calls.tools import ToolCallRecord
from stepfleet.orchestrator.records.outcome import ContinuationOutcome, brief
from stepfleet.orchestrator.records.run.results import end_state
from stepfleet.orchestrator.records.state import Lifecycle
from stepfleet.orchestrator.records.steps import LoggedStep


def events_of(claim: Claim, attempt: Attempt, verdict: Verdict, facts: Facts) -> Events:
    """Return the envelopes of one commit, in the order of its events."""
    found: list[Event] = []
    traced = verdict.outcome if claim.config.broadcast.include_continuation_trace else None
    if verdict.logged:
        found += _step(claim, verdict.logged, facts, traced)
    if traced:
        found.append(_event(claim, EventType.CONTINUATION, facts.now, _trace(claim, traced)))
    if verdict.waiting:
        found += _requests(claim, attempt, verdict.waiting, facts)
    if verdict.move is Move.RETRY and verdict.failure:
        payload = {
            "step_number": claim.number,
            "error": verdict.failure.message,
            "error_code": verdict.failure.code,
            "attempt": claim.attempts + claim.limited + 1,
            "retry_in_seconds": round(verdict.delay, 3),
            "duration_ms": round(attempt.span.seconds * 1000, 3),
        }
        found.append(_event(claim, EventType.STEP_RETRIED, facts.now, payload))
    if verdict.stop_reason:
        ended = status_payload(
            end_state(verdict.stop_reason).value,
            before=Lifecycle.IN_PROGRESS.value,
            steps=verdict.state.step_count,
            error=verdict.error,
            last_response=verdict.state.last_output,
        )
        ended |= _tenant(claim)
        found.append(_event(claim, EventType.STATUS, facts.now, ended))
    return Events(found)


def _requests(claim: Claim, attempt: Attempt, waiting: Waiting, facts: Facts) -> Iterator[Event]:
    """Yield what the step asks people for."""
    response = attempt.answer.response if isinstance(attempt, Parked) else None
    for one in waiting.calls:
        awaited = awaited_by(one.queue)
        if awaited is None or not awaited.by_people or response is None:
            continue
        call = (response.tool_calls or ())[one.index]
        until = None if one.within is None else facts.now + timedelta(seconds=one.within)
        payload = {
            "step_number": claim.number,
            **tool_started(claim.config.broadcast, call.name, call.id, call.arguments),
            "key": one.key,
            "kind": "question" if awaited is Awaited.PERSON else "approval",
            "until": until and stamp(until),
        }
        yield _event(claim, EventType.ASKED, facts.now, payload | _tenant(claim))


def domain_events(verdict: Verdict, events: Events) -> Iterator[DomainEvent]:
    """Yield the events of one commit for subscribers: with whole arguments and full outcomes.

    `events` are the commit's envelopes. After each step come its evaluation and the new state.
    """
    ends: list[DomainEvent] = []
    calls = iter(verdict.logged.result.tool_calls if verdict.logged else ())
    status = Lifecycle.IN_PROGRESS
    for event in events:
        for one in () if event.type is EventType.CONTINUATION else from_event(event):
            if isinstance(one, ToolCallStarted):
                yield one.model_copy(update={"args": next(calls).arguments})
            elif isinstance(one, AgentStateUpdated):
                status = one.status
            elif isinstance(one, AgentFinished | AgentFailed):
                ends.append(one)
            else:
                yield one
            if isinstance(one, AgentStepCompleted) and verdict.outcome:
                yield made(ContinuationEvaluated, event, outcome=verdict.outcome)
    if verdict.logged or ends:
        state = {"status": status, "step_count": verdict.state.step_count}
        before = Lifecycle.IN_PROGRESS
        yield made(AgentStateUpdated, events[-1], previous_status=before, **state)
    yield from ends


def step_started(claim: Claim, at: datetime) -> Event:
    """Return the event of a step's start."""
    payload = {
        "step_number": claim.number,
        "message_count": len(claim.state.messages),
        "available_tools": [tool.name for tool in claim.config.tools],
    }
    return _event(claim, EventType.STEP_STARTED, at, payload)


def tool_started(
    broadcast: BroadcastConfig, name: str, call_id: str, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the payload of a tool's start."""
    started: dict[str, Any] = {"tool_name": name, "tool_call_id": call_id}
    if broadcast.include_tool_args:
        started["args"] = args_shown(arguments, broadcast.max_arg_length)
    else:
        started["args_summary"] = args_summary(arguments)
    return started


def _step(
    claim: Claim, logged: LoggedStep, facts: Facts, traced: ContinuationOutcome | None
) -> list[Event]:
    result = logged.result
    found = [step_started(claim, result.started_at)]
    for call in result.tool_calls:
        found += _tool_call(claim, call)
    completed: dict[str, Any] = {
        "step_number": result.step,
        "has_tool_calls": result.has_tool_calls,
        "errors": [error.message for error in result.errors],
        "finish_reason": result.finish_reason.value,
        "usage": result.usage.to_dict() if result.usage else None,
        "duration_ms": round(result.duration_ms, 3),
    }
    if result.errors:
        completed["error_codes"] = [error.code for error in result.errors]
    if result.refused:
        completed["refused"] = result.refused
    if result.cached:
        completed["cached"] = True
    if result.waited_seconds:
        completed |= {"waited_seconds": result.waited_seconds, "waited_for": result.waited_for}
    if result.fallback:
        completed["fallback"] = {
            "model": result.fallback.model,
            "failed": [{"model": one.model, "code": one.code} for one in result.fallback.failed],
        }
    if (made := logged.handoff) is not None:
        by, to = made.by.name, made.to.name
        completed["handoff"] = {"by": by, "to": to, "reason": made.reason}
    completed |= _tenant(claim)
    if traced:
        completed["continuation"] = brief(traced)
    return [*found, _event(claim, EventType.STEP_COMPLETED, facts.now, completed)]


def _tenant(claim: Claim) -> dict[str, str]:
    return {"tenant": claim.tenant} if claim.tenant else {}


def _tool_call(claim: Claim, call: ToolCallRecord) -> list[Event]:
    started = tool_started(claim.config.broadcast, call.tool_name, call.call_id, call.arguments)
    completed: dict[str, Any] = {
        "tool_name": call.tool_name,
        "tool_call_id": call.call_id,
        "success": not call.is_error,
        "error": call.error.message if call.error else None,
        "duration_ms": call.duration_ms,
        "result_summary": result_summary(call.result),
    }
    ended = call.timestamp + timedelta(milliseconds=call.duration_ms or 0)
    return [
        _event(claim, EventType.TOOL_STARTED, call.timestamp, started),
        _event(claim, EventType.TOOL_COMPLETED, ended, completed),
    ]


def _trace(claim: Claim, outcome: ContinuationOutcome) -> dict[str, Any]:
    return {
        "step_number": claim.number,
        **brief(outcome),
        "evaluations": [
            {
                "criterion": one.criterion.rpartition(".")[2],
                "decision": one.decision.value,
                "reason": one.reason,
            }
            for one in outcome.evaluations
        ],
    }


def _event(claim: Claim, kind: EventType, at: datetime, payload: dict[str, Any]) -> Event:
    state = claim.state
    return Event(kind, claim.run_id, state.info.execution_id, at, payload, state.parent_agent_id)
