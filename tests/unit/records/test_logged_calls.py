"""Calls of a log that are read when somebody looks: equal to the calls themselves."""

import pytest
from pydantic import ValidationError
from support.runs.agent_records import START, a_call, a_state

from stepfleet.orchestrator import AgentState, LoggedStep, StepResult, ToolCallRecord
from stepfleet.orchestrator.records.calls.tools import LoggedCalls


def stored(*calls: ToolCallRecord) -> str:
    return LoggedStep(result=StepResult(step=1, tool_calls=calls, started_at=START)).to_json()


CALLS = tuple(a_call(f"c{number}") for number in range(4))
LOGGED = LoggedCalls([stored(*CALLS[:2]), stored()]) + CALLS[2:3] + CALLS[3:]


def test_they_are_what_the_calls_are() -> None:
    assert list(LOGGED) == list(CALLS)
    assert LOGGED == CALLS == LOGGED
    assert CALLS[:3] != LOGGED
    assert LOGGED + CALLS == CALLS + LOGGED == CALLS * 2
    assert (len(LOGGED), LOGGED[-1], LOGGED[1:3]) == (4, CALLS[3], CALLS[1:3])
    assert repr(LOGGED) == repr(tuple(LOGGED))


def test_a_state_with_them_is_stored_as_one_with_the_calls() -> None:
    state, usual = a_state(1, tool_results=LOGGED), a_state(1, tool_results=CALLS)
    assert state == usual
    assert state.to_json() == usual.to_json()
    assert state.to_dict() == usual.to_dict()
    assert AgentState.from_json(state.to_json()).tool_results == CALLS


def test_nothing_is_read_before_somebody_looks() -> None:
    unread = LoggedCalls(["no record"]) + CALLS
    with pytest.raises(ValidationError):
        len(unread)
