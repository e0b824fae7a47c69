from datetime import timedelta
from typing import Any

import pytest
from pydantic import ValidationError
from support.runs.agent_records import (
    START,
    a_call,
    a_failed_step,
    a_last_step,
    a_state,
    a_step,
    an_info,
)

from stepfleet.orchestrator import AgentState, FinishReason, Lifecycle, Message, UsageStats
from stepfleet.orchestrator.continuation import base_criteria
from stepfleet.orchestrator.records.state import LastStep, StateInfo
from stepfleet.orchestrator.records.steps import StepType


def test_with_methods_return_new_states_and_leave_the_old_one_alone() -> None:
    """STATE-01"""
    state = a_state(1, messages=(Message.user("hi"),))
    before = state.to_json()
    changed = (
        state.with_message(Message.assistant("hello"))
        .with_tool_result(a_call())
        .with_continuation_outcome(base_criteria().evaluate(state))
    )
    assert [message.text for message in changed.messages] == ["hi", "hello"]
    assert changed.tool_results == (a_call(),)
    assert changed.last_continuation_outcome is not None
    assert state.to_json() == before


@pytest.mark.parametrize("field", ["messages", "tool_results", "metadata", "step_count"])
def test_no_field_of_a_state_can_be_assigned(field: str) -> None:
    """STATE-01"""
    state = a_state()
    with pytest.raises(ValidationError, match="frozen"):
        setattr(state, field, getattr(state, field))


@pytest.mark.parametrize("field", ["metadata", "strategy_state", "custom_state"])
def test_nested_data_is_not_shared_between_copies(field: str) -> None:
    """STATE-02"""
    nested: dict[str, Any] = {field: {"deep": {"list": [1]}}}
    state = a_state(0, **nested)
    copy = state.with_message(Message.user("x"))
    getattr(copy, field)["deep"]["list"].append(2)
    assert getattr(state, field) == {"deep": {"list": [1]}}


def test_a_state_has_the_fields_that_other_rooms_build_on() -> None:
    """STATE-03, STATE-06, TIME-01"""
    needed = {"agent_id", "parent_agent_id", "status", "current_step", "usage", "metadata"}
    needed |= {"strategy_state", "custom_state", "tool_results"}
    needed |= {"last_result", "last_error", "last_output", "last_continuation_outcome"}
    assert needed <= set(AgentState.model_fields)
    clocks = {"started_at", "execution_started_at", "cumulative_execution_seconds"}
    assert {"id", "updated_at", *clocks} <= set(StateInfo.model_fields)


def test_a_full_state_survives_storage() -> None:
    """CONT-30, STATE-05"""
    state = a_state(
        2,
        parent_agent_id="p",
        metadata={"k": [1]},
        usage=UsageStats(total_tokens=3),
        stop_requested="",
        last_error="boom",
        info=an_info(execution_started_at=START, cumulative_execution_seconds=1.25),
    )
    state = state.with_continuation_outcome(base_criteria().evaluate(state))
    assert AgentState.from_json(state.to_json()) == state


def test_execution_time_is_added_in_a_copy_and_survives_storage() -> None:
    """TIME-09, TIME-08"""
    info = an_info()
    longer = info.add_execution_time(1.5).add_execution_time(0.25)
    assert (info.cumulative_execution_seconds, longer.cumulative_execution_seconds) == (0.0, 1.75)
    assert StateInfo.from_json(longer.to_json()) == longer


def test_data_without_cumulative_time_loads_as_zero() -> None:
    """TIME-08"""
    old = f'{{"id": "r", "started_at": "{START.isoformat()}", "updated_at": "{START.isoformat()}"}}'
    assert StateInfo.from_json(old).cumulative_execution_seconds == 0.0


def test_a_later_moment_moves_updated_at_and_never_started_at() -> None:
    """STATE-04, TIME-06"""
    later = an_info().at(START + timedelta(days=3)).add_execution_time(9)
    assert (later.started_at, later.updated_at) == (START, START + timedelta(days=3))


@pytest.mark.parametrize("state", list(Lifecycle))
def test_the_last_four_states_of_life_are_ends(state: Lifecycle) -> None:
    """STATE-10 (DIS-02)"""
    assert [one.value for one in Lifecycle][:3] == ["queued", "in_progress", "paused"]
    assert state.is_terminal is (state.value in {"completed", "failed", "cancelled", "stopped"})


def test_the_last_step_keeps_what_criteria_ask_for() -> None:
    """CONT-30, STATE-11"""
    acted = a_step(
        3,
        tool_calls=(a_call(),),
        type=StepType.TOOL_EXECUTION,
        finish_reason=FinishReason.TOOL_CALLS,
    )
    last = LastStep.of(acted)
    assert (last.step, last.type, last.has_tool_calls) == (3, StepType.TOOL_EXECUTION, True)
    assert (last.finish_reason, last.text) == (FinishReason.TOOL_CALLS, "answer 3")
    assert LastStep.of(a_failed_step(4)).type is StepType.ERROR
    assert LastStep.of(a_step(1)) == a_last_step(text="answer 1")


def test_usage_adds_and_takes_away_field_by_field() -> None:
    """RUN-08, RUN-09"""
    told = UsageStats().model_dump()
    assert told.keys() >= {"prompt_tokens", "completion_tokens", "total_tokens"}
    assert set(told.values()) == {0}
    fields = list(UsageStats.model_fields)
    one = UsageStats(**{name: n for n, name in enumerate(fields, start=1)})
    two = UsageStats(**{name: 10 * n for n, name in enumerate(fields, start=1)})
    assert one + UsageStats() == one
    assert (one + two).model_dump() == {name: 11 * n for n, name in enumerate(fields, start=1)}
    assert one + two - two == one
