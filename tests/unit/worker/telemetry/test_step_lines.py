"""Steps as lines of a log."""

import logging
from typing import Any, cast

import pytest
from support.runs.agent_records import a_call, a_failed_step, a_step, an_error

from stepfleet.orchestrator import ErrorType, UsageStats
from stepfleet.orchestrator.protocol.claim import Committed
from stepfleet.orchestrator.records.run.report import described
from stepfleet.orchestrator.records.steps import StepType
from stepfleet.worker.telemetry import StepLogger, step_logger


def test_a_step_is_reported_on_one_line() -> None:
    """OBS-09"""
    call = a_call("c1", tool_name="add", result="3\nor so")
    failed = a_call("c2", result=None, is_error=True, error=an_error(message="no luck"))
    step = a_step(
        2,
        thought="I'll\nadd",
        tool_calls=(call, failed),
        type=StepType.TOOL_EXECUTION,
        duration_ms=12.4,
        usage=UsageStats(total_tokens=15),
        errors=(an_error(message="no luck"),),
    )
    assert described(step) == (
        "step 2: tool_execution (12 ms, 15 tokens): Planning: I'll add; "
        'Action: add {"a": 1, "b": 2}; Observation: 3 or so; '
        'Action: add {"a": 1, "b": 2}; Observation (error): Error: {"error": {"code": '
        '"UNKNOWN_ERROR", "message": "no luck", "retryable": false}}'
    )


def test_an_answer_and_a_failure_are_reported_as_such() -> None:
    """OBS-09"""
    assert described(a_step(1)) == (
        "step 1: final_response (0 ms, no usage): FinalAnswer: answer 1"
    )
    assert described(a_failed_step(3, ErrorType.TIMEOUT)).endswith(
        "error (0 ms, no usage): Error: timeout (UNKNOWN_ERROR): timeout error"
    )


def test_steps_whose_lines_nobody_reads_are_not_observed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """OBS-09: no cost where text is logged, at the usual level."""
    caplog.set_level(logging.INFO, logger="stepfleet.steps")
    assert step_logger(as_json=False) == ()
    assert len(step_logger(as_json=True)) == 1
    caplog.set_level(logging.DEBUG, logger="stepfleet.steps")
    assert len(step_logger(as_json=False)) == 1


def test_a_step_that_cannot_be_logged_is_committed_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """OBS-09: its line is missing, and that is said."""

    class Odd:
        """A claim and a verdict of which nothing can be said."""

        run_id = "run-1"
        logged = object()

    odd = cast("Any", Odd())
    StepLogger(logging.INFO).committed(odd, odd, odd, Committed(applied=True))
    assert "a step of run run-1 could not be logged" in caplog.text
