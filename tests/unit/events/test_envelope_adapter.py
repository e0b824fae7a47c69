"""Which envelopes come of a commit, and with which payload."""

from datetime import timedelta
from typing import Any

import pytest
from support.runs.agent_records import START, a_call, an_error, an_info
from support.runs.scripted_steps import call, say
from support.runs.seen_steps import a_claim

from stepfleet.orchestrator import (
    Agent,
    AgentState,
    ErrorHandlingDecision,
    ErrorPolicy,
    ErrorType,
    Lifecycle,
    Message,
    tool,
)
from stepfleet.orchestrator.agents.agent import criteria_of
from stepfleet.orchestrator.events.envelope import Event, EventType, channel_of
from stepfleet.orchestrator.protocol.attempt import Answered, Attempt, Failed, Span
from stepfleet.orchestrator.protocol.commit_events import events_of
from stepfleet.orchestrator.protocol.verdict import Facts, decide

SPAN = Span(START, 0.25)
NOW = START + timedelta(seconds=1)
GOOD = a_call("c0", tool_name="look", arguments={"what": "it"}, result="seen", duration_ms=40.0)
BAD = a_call(
    "c1",
    tool_name="look",
    arguments={},
    result=None,
    is_error=True,
    error=an_error(ErrorType.TOOL, message="it broke"),
)
ASKED = call(("look", {"what": "it"}), ("look", {}))
LOOKED = Answered(SPAN, ASKED, (GOOD, BAD), ("seen", "it broke"))
SAID = Answered(SPAN, say("Done."))
LOST = Failed(SPAN, an_error(ErrorType.MODEL, message="no answer"))


@tool
def look(what: str) -> str:
    """Look something up."""
    return what


def told(attempt: Attempt, **config: Any) -> list[Event]:
    """Return the envelopes of the commit of a run's first step."""
    fields = {"error_policy": ErrorPolicy(tool=ErrorHandlingDecision.IGNORE), **config}
    agent = Agent("teller", model="openai:m", tools=[look], **fields)
    state = AgentState(
        agent_id="r1",
        info=an_info(id="r1", execution_id="r1:1", execution_started_at=START),
        status=Lifecycle.IN_PROGRESS,
        messages=(Message.user("hi"),),
    )
    claim = a_claim(run_id="r1", now=START, state=state, config=agent.config)
    facts = Facts(NOW)
    return list(
        events_of(claim, attempt, decide(claim, attempt, criteria_of(agent.config), facts), facts)
    )


def payloads(events: list[Event], kind: EventType) -> list[dict[str, Any]]:
    return [one.payload for one in events if one.type is kind]


def test_a_step_with_tools_is_reported_in_the_order_in_which_it_happened() -> None:
    """EVT-03, EVT-04: all of the session, by its execution."""
    events = told(LOOKED)
    tool_told = [EventType.TOOL_STARTED, EventType.TOOL_COMPLETED]
    assert [one.type for one in events] == [
        EventType.STEP_STARTED,
        *tool_told,
        *tool_told,
        EventType.STEP_COMPLETED,
    ]
    assert {(one.session_id, one.execution_id) for one in events} == {("r1", "r1:1")}
    assert channel_of("r1") == "agent.r1"


def test_a_steps_beginning_says_what_the_model_was_shown() -> None:
    """EVT-05"""
    assert payloads(told(LOOKED), EventType.STEP_STARTED) == [
        {"step_number": 1, "message_count": 1, "available_tools": ["look"]}
    ]
    assert told(LOOKED)[0].timestamp == START


def test_a_steps_end_has_usage_duration_and_errors() -> None:
    """EVT-06"""
    (ended,) = payloads(told(LOOKED), EventType.STEP_COMPLETED)
    assert (ended["step_number"], ended["has_tool_calls"]) == (1, True)
    assert (ended["duration_ms"], ended["finish_reason"]) == (250.0, "tool_calls")
    assert ended["usage"]["total_tokens"] == 15
    assert ended["errors"] == ["it broke"]
    assert "continuation" not in ended


def test_a_tool_call_is_reported_with_its_id_and_how_it_ended() -> None:
    """EVT-07, EVT-08, EVT-12: success and failure."""
    begun, bare = payloads(told(LOOKED), EventType.TOOL_STARTED)
    assert begun == {"tool_name": "look", "tool_call_id": "c0", "args_summary": 'what: "it"'}
    assert bare["tool_call_id"] == "c1"
    good, bad = payloads(told(LOOKED), EventType.TOOL_COMPLETED)
    assert good == {
        "tool_name": "look",
        "tool_call_id": "c0",
        "success": True,
        "error": None,
        "duration_ms": 40.0,
        "result_summary": "seen",
    }
    assert (bad["success"], bad["error"], bad["result_summary"]) == (False, "it broke", None)


def test_the_evaluations_are_reported_where_they_are_asked_for_with_short_names() -> None:
    """EVT-09: off by default."""
    assert payloads(told(LOOKED), EventType.CONTINUATION) == []
    (traced,) = payloads(told(LOOKED, broadcast="debug"), EventType.CONTINUATION)
    assert traced["should_continue"] is True
    assert traced["stop_reason"] is None
    names = {one["criterion"] for one in traced["evaluations"]}
    assert {"StepsLimit", "ErrorPolicyCriterion"} <= names
    assert not any("." in name for name in names)


@pytest.mark.parametrize(
    ("attempt", "status", "error", "last"),
    [(SAID, "completed", None, "Done."), (LOST, "failed", "no answer", None)],
)
def test_the_end_is_a_change_of_status_with_what_the_run_came_to(
    attempt: Attempt, status: str, error: str | None, last: str | None
) -> None:
    """EVT-10"""
    (ended,) = payloads(told(attempt), EventType.STATUS)
    assert (ended["status"], ended["step_count"], ended["last_response"]) == (status, 1, last)
    assert ended["error_message"] is None if error is None else error in ended["error_message"]
    assert payloads(told(LOOKED), EventType.STATUS) == []
