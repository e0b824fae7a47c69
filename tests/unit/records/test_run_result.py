import json
import pickle
from datetime import date, timedelta
from typing import Any

import pytest
from pydantic import BaseModel
from support.runs.agent_records import (
    START,
    a_call,
    a_failed_state,
    a_failed_step,
    a_result,
    a_step,
    an_error,
)

from stepfleet.orchestrator import (
    AgentRunResult,
    ErrorType,
    Lifecycle,
    MaxStepsExceeded,
    RunFailed,
    RunStatus,
    StepResult,
    StopReason,
    ToolCallRecord,
)
from stepfleet.orchestrator.continuation import base_criteria
from stepfleet.orchestrator.errors import RunActive, StructuredDataError
from stepfleet.orchestrator.records.run.results import end_state, run_status

ENDS = [
    (StopReason.COMPLETED, RunStatus.COMPLETED, Lifecycle.COMPLETED),
    (StopReason.FINISH_REASON, RunStatus.COMPLETED, Lifecycle.COMPLETED),
    (StopReason.STEPS_LIMIT, RunStatus.MAX_ITERATIONS_REACHED, Lifecycle.STOPPED),
    (StopReason.TOKEN_LIMIT, RunStatus.MAX_ITERATIONS_REACHED, Lifecycle.STOPPED),
    (StopReason.TIME_LIMIT, RunStatus.MAX_ITERATIONS_REACHED, Lifecycle.STOPPED),
    (StopReason.ERROR, RunStatus.ERROR, Lifecycle.FAILED),
    (StopReason.RETRY_LIMIT, RunStatus.ERROR, Lifecycle.FAILED),
    (StopReason.GUARD, RunStatus.ERROR, Lifecycle.STOPPED),
    (StopReason.USER_REQUESTED, RunStatus.CANCELLED, Lifecycle.CANCELLED),
]
LIMITS = [StopReason.STEPS_LIMIT, StopReason.TOKEN_LIMIT, StopReason.TIME_LIMIT]
FAILURES = [StopReason.ERROR, StopReason.RETRY_LIMIT, StopReason.GUARD]


class Verdict(BaseModel):
    """What a caller wants back."""

    score: int
    day: date


def with_data(data: Any, schema_name: str | None = "Verdict") -> AgentRunResult:
    return a_result(structured=data, schema_name=schema_name)


@pytest.mark.parametrize(("reason", "status", "lifecycle"), ENDS)
def test_status_and_end_state_follow_from_the_stop_reason(
    reason: StopReason, status: RunStatus, lifecycle: Lifecycle
) -> None:
    """RUN-04, STATE-10, RUN-03"""
    assert (run_status(reason), end_state(reason)) == (status, lifecycle)
    assert len(ENDS) == len(StopReason) == 9
    names = {"completed", "max_iterations_reached", "error", "cancelled"}
    assert {one.value for one in RunStatus} == names


def test_a_result_has_its_fields() -> None:
    """RUN-02, RUN-01, RUN-05"""
    fields = {"run_id", "agent_name", "output", "status", "steps", "usage", "start_time"}
    fields |= {"tool_calls_total", "tool_calls_by_name", "end_time", "duration_seconds"}
    fields |= {"error", "max_iterations", "stop_reason", "steps_used", "success"}
    assert fields <= set(a_result().to_dict())


def test_what_can_be_counted_is_computed_and_not_stored() -> None:
    """RUN-05, RUN-10, RUN-12, RUN-20"""
    computed = {"steps_used", "success", "tool_calls_by_name", "tool_calls_total"}
    assert not (computed | {"duration_seconds"}) & set(AgentRunResult.model_fields)
    calls = (a_call("c1"), a_call("c2", tool_name="find"), a_call("c3"))
    result = a_result(steps=(a_step(1, tool_calls=calls), a_step(2)))
    assert (result.steps_used, result.success, result.tool_calls_total) == (2, True, 3)
    assert result.tool_calls_by_name == {"add": 2, "find": 1}
    assert result.duration_seconds == 2.0
    assert not computed & set(json.loads(result.to_json()))


def test_a_result_is_complete_json_and_loads_back_equal() -> None:
    """RUN-18"""
    result = a_result(
        StopReason.ERROR,
        error="boom",
        steps=(a_step(1, tool_calls=(a_call(error=an_error(), is_error=True),)), a_failed_step(2)),
        outcome=base_criteria().evaluate(a_failed_state(ErrorType.MODEL)),
        structured={"a": [1, None]},
        end_time=START + timedelta(milliseconds=1),
    )
    assert AgentRunResult.model_validate(json.loads(json.dumps(result.to_dict()))) == result
    assert AgentRunResult.from_json(result.to_json()) == result
    assert pickle.loads(pickle.dumps(result)) == result  # noqa: S301 - our own


@pytest.mark.parametrize(
    "name",
    ["final_text", "iterations", "conversation_history", "final_message", "state", "iteration"],
)
def test_old_and_duplicated_names_are_absent(name: str) -> None:
    """RUN-32, RUN-11, RUN-07"""
    assert not hasattr(a_result(), name)
    assert name not in {*StepResult.model_fields, *ToolCallRecord.model_fields}


def test_the_summary_is_one_line_of_six_parts() -> None:
    """RUN-19"""
    assert a_result().summary() == (
        "[completed] solver | steps: 2/10 | tool calls: 1 (add\u00d71) | tokens: 40 | "
        "duration: 2.00s"
    )


def test_the_summary_of_a_run_that_has_not_ended() -> None:
    """RUN-19"""
    active = a_result(
        lifecycle=Lifecycle.IN_PROGRESS, status=None, stop_reason=None, end_time=None, steps=()
    )
    assert active.summary() == (
        "[in_progress] solver | steps: 0/10 | tool calls: 0 (none) | tokens: 40 | duration: n/a"
    )


def test_a_name_with_a_newline_does_not_break_the_summarys_line() -> None:
    """RUN-19"""
    named = a_step(1, tool_calls=(a_call(tool_name="odd\nname"),))
    assert "\n" not in a_result(steps=(named,)).summary()


def test_a_completed_run_raises_nothing() -> None:
    """RUN-29"""
    for reason in (StopReason.COMPLETED, StopReason.FINISH_REASON):
        result = a_result(reason)
        assert result.raise_for_status() is result


@pytest.mark.parametrize("reason", LIMITS)
def test_a_run_that_met_a_limit_raises_max_steps_exceeded_with_its_result(
    reason: StopReason,
) -> None:
    """RUN-29, RUN-30"""
    result = a_result(reason)
    with pytest.raises(MaxStepsExceeded, match=reason.value) as caught:
        result.raise_for_status()
    assert caught.value.result == result
    assert caught.value.result.output == "It is 3"


@pytest.mark.parametrize("reason", FAILURES)
def test_a_failed_run_raises_its_error(reason: StopReason) -> None:
    """RUN-29"""
    failed = a_step(1, errors=(an_error(ErrorType.TIMEOUT, code="TIMEOUT_ERROR", retryable=True),))
    result = a_result(reason, error="too slow", steps=(failed,))
    with pytest.raises(RunFailed, match=r"solver.*too slow") as caught:
        result.raise_for_status()
    told = (caught.value.code, caught.value.type, caught.value.retryable)
    assert told == ("TIMEOUT_ERROR", ErrorType.TIMEOUT, True)
    copy = pickle.loads(pickle.dumps(caught.value))  # noqa: S301 - our own
    assert (copy.code, copy.result) == ("TIMEOUT_ERROR", result)


def test_a_cancelled_run_and_an_active_one_raise_too() -> None:
    """RUN-29"""
    with pytest.raises(RunFailed, match="cancelled"):
        a_result(StopReason.USER_REQUESTED).raise_for_status()
    active = a_result(status=None, stop_reason=None, lifecycle=Lifecycle.PAUSED, end_time=None)
    with pytest.raises(RunActive, match="paused"):
        active.raise_for_status()


def test_structured_data_becomes_the_callers_type() -> None:
    """RUN-21, RUN-22"""
    result = with_data({"score": 3, "day": "2026-03-01"})
    assert result.structured_as(Verdict) == Verdict(score=3, day=date(2026, 3, 1))
    assert result.structured_as(dict[str, Any]) == {"score": 3, "day": "2026-03-01"}
    assert result.to_dict()["schema_name"] == "Verdict"


@pytest.mark.parametrize(
    ("result", "place"),
    [
        (with_data(None), "'<root>' holds no structured data"),
        (with_data({"score": 1}, schema_name=None), "'schema_name'"),
        (with_data({"score": 1}, schema_name="Other"), "'<root>' has the schema 'Other'"),
        (with_data({"score": "many", "day": "2026-03-01"}), "'score'"),
        (with_data({"score": 1}), "'day' is missing"),
    ],
)
def test_data_that_is_missing_or_of_another_schema_is_an_error_with_its_place(
    result: AgentRunResult, place: str
) -> None:
    """RUN-22"""
    with pytest.raises(StructuredDataError, match=place):
        result.structured_as(Verdict)
