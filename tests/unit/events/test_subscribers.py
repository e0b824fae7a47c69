"""Who is told of what: by type, of everything, and when a function fails."""

from datetime import UTC, datetime
from typing import Any

import pytest

from stepfleet.orchestrator import ContinuationDecision, Lifecycle, StopReason, Subscribers
from stepfleet.orchestrator.events.domain_events import (
    AgentFailed,
    AgentFinished,
    AgentStateUpdated,
    AgentStepCompleted,
    AgentStepStarted,
    ContinuationEvaluated,
    DomainEvent,
    TokenUsageReported,
    ToolCallCompleted,
    ToolCallStarted,
    from_envelope,
)

AT = "2026-01-02T12:00:01.500Z"


def envelope(kind: str, **payload: Any) -> dict[str, Any]:
    return {
        "sequence": 1,
        "event_id": "run:1",
        "type": kind,
        "session_id": "run",
        "execution_id": "run:1",
        "timestamp": AT,
        "payload": payload,
        "parent_agent_id": "parent",
    }


def status(word: str, **payload: Any) -> dict[str, Any]:
    told = {
        "status": word,
        "previous_status": "in_progress",
        "step_count": 2,
        "error_message": None,
        "last_response": "said",
    }
    return envelope("agent.status", **{**told, **payload})


STARTED = envelope("agent.tool.started", tool_name="look", tool_call_id="c1", args={"a": 1})
COMPLETED = envelope(
    "agent.tool.completed",
    tool_name="look",
    tool_call_id="c1",
    success=False,
    error="no",
    duration_ms=500.0,
    result_summary=None,
)
STEP = envelope(
    "agent.step.completed",
    step_number=2,
    has_tool_calls=True,
    errors=["no"],
    finish_reason="tool_calls",
    usage={"total_tokens": 15},
    duration_ms=12.5,
)
TRACE = envelope(
    "agent.continuation",
    step_number=2,
    should_continue=False,
    stop_reason="steps_limit",
    resolved_by="StepLimit",
    evaluations=[{"criterion": "StepLimit", "decision": "forbid", "reason": "2 of 2 steps"}],
)


def test_tool_calls_are_reported_with_their_tool_and_arguments() -> None:
    """EVT-13: the field is `tool`, not a name."""
    (started,) = from_envelope(STARTED)
    (completed,) = from_envelope(COMPLETED)
    assert isinstance(started, ToolCallStarted)
    assert (started.tool, started.args, started.tool_call_id) == ("look", {"a": 1}, "c1")
    assert isinstance(completed, ToolCallCompleted)
    assert (completed.tool, completed.success, completed.error) == ("look", False, "no")
    assert completed.ended_at == datetime(2026, 1, 2, 12, 0, 1, 500_000, tzinfo=UTC)
    assert (completed.ended_at - completed.started_at).total_seconds() == 0.5
    assert not hasattr(started, "name")
    assert started.agent_id == "run"
    assert started.parent_agent_id == "parent"


def test_a_summary_stands_where_arguments_were_not_told() -> None:
    """EVT-13"""
    told = envelope("agent.tool.started", tool_name="look", tool_call_id="c", args_summary="a: 1")
    (event,) = from_envelope(told)
    assert isinstance(event, ToolCallStarted)
    assert (event.args, event.args_summary) == (None, "a: 1")


def test_an_evaluation_reads_as_a_sentence() -> None:
    """EVT-14: agent, step, decision, reason."""
    (event,) = from_envelope(TRACE)
    assert isinstance(event, ContinuationEvaluated)
    assert str(event) == "agent run step 2: STOP (steps_limit), 2 of 2 steps"
    assert event.outcome.decision is ContinuationDecision.FORBID_CONTINUATION
    assert event.outcome.stop_reason is StopReason.STEPS_LIMIT
    goes_on = {**TRACE["payload"], "should_continue": True, "stop_reason": None}
    (event,) = from_envelope({**TRACE, "payload": goes_on})
    assert ": CONTINUE, " in str(event)


@pytest.mark.parametrize(
    ("told", "types"),
    [
        (envelope("agent.step.started", step_number=1, message_count=2), [AgentStepStarted]),
        (STEP, [AgentStepCompleted, TokenUsageReported]),
        (status("in_progress"), [AgentStateUpdated]),
        (status("completed"), [AgentStateUpdated, AgentFinished]),
        (status("stopped"), [AgentStateUpdated, AgentFinished]),
        (status("cancelled"), [AgentStateUpdated, AgentFinished]),
        (status("failed", error_message="why"), [AgentStateUpdated, AgentFailed]),
        (envelope("agent.step.retried", step_number=1), []),
        (envelope("agent.stream.chunk", chunk="x"), []),
    ],
)
def test_each_envelope_becomes_its_events(
    told: dict[str, Any], types: list[type[DomainEvent]]
) -> None:
    """EVT-15"""
    assert [type(event) for event in from_envelope(told)] == types


def test_the_facts_of_an_end_are_kept() -> None:
    """EVT-15"""
    failed = from_envelope(status("failed", error_message="why"))[1]
    finished = from_envelope(status("stopped"))[1]
    usage = from_envelope(STEP)[1]
    assert isinstance(failed, AgentFailed)
    assert (failed.error, failed.step_count, failed.last_response) == ("why", 2, "said")
    assert isinstance(finished, AgentFinished)
    assert finished.status is Lifecycle.STOPPED
    assert isinstance(usage, TokenUsageReported)
    assert (usage.operation, usage.usage.total_tokens, usage.step_number) == ("step", 15, 2)


async def test_subscribers_hear_their_type_and_a_wiretap_hears_all() -> None:
    """EVT-16"""
    by_type: list[DomainEvent] = []
    everything: list[DomainEvent] = []

    async def keep(event: DomainEvent) -> None:
        everything.append(event)

    told = Subscribers().on(ToolCallCompleted, by_type.append).wiretap(keep)
    for one in (STARTED, COMPLETED, STEP, status("completed")):
        await told.broadcast("agent.run", one)
    assert [type(event) for event in by_type] == [ToolCallCompleted]
    assert [type(event) for event in everything] == [
        *(ToolCallStarted, ToolCallCompleted, AgentStepCompleted, TokenUsageReported),
        *(AgentStateUpdated, AgentFinished),
    ]


async def test_a_function_that_fails_hurts_no_other_and_is_counted() -> None:
    """EVT-20"""
    heard: list[DomainEvent] = []

    def fails(event: DomainEvent) -> None:
        raise RuntimeError("no")

    told = Subscribers().wiretap(fails).wiretap(heard.append)
    await told.broadcast("agent.run", STARTED)
    await told.publish(from_envelope(STARTED)[0], in_thread=True)
    assert len(heard) == 2
    assert told.failures == 2
