"""Steps as lines of a log."""

import logging
from typing import Any, cast

import pytest
from support.runs.agent_records import a_call, a_failed_step, a_step, an_error

from stepfleet.orchestrator.records.errors import ErrorType
from stepfleet.orchestrator.records.run.step_lines import described
from stepfleet.orchestrator.records.steps import StepType
from stepfleet.orchestrator.records.usage import UsageStats
from stepfleet.worker.ports import Store
from stepfleet.worker.telemetry import LoggedStore, logged


def test_a_step_is_told_on_one_line() -> None:
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


def test_an_answer_and_a_failure_are_told_as_such() -> None:
    """OBS-09"""
    assert described(a_step(1)) == (
        "step 1: final_response (0 ms, no usage): FinalAnswer: answer 1"
    )
    assert described(a_failed_step(3, ErrorType.TIMEOUT)).endswith(
        "error (0 ms, no usage): Error: timeout (UNKNOWN_ERROR): timeout error"
    )


def test_a_store_whose_lines_nobody_reads_is_left_as_it_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """OBS-09: no cost where text is logged, at the usual level."""

    class Some:
        journal = None

    store = cast("Store", Some())
    caplog.set_level(logging.INFO, logger="stepfleet.steps")
    assert logged(store, as_json=False) is store
    assert isinstance(logged(store, as_json=True), LoggedStore)
    caplog.set_level(logging.DEBUG, logger="stepfleet.steps")
    assert isinstance(logged(store, as_json=False), LoggedStore)


async def test_a_step_that_cannot_be_told_is_committed_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """OBS-09: its line is missing, and that is said."""

    class Applied:
        applied = True

    class Accepting:
        journal = None

        async def commit(self, *_: object) -> Applied:
            return Applied()

    class Odd:
        """A claim and a verdict of which nothing can be said."""

        run_id = "run-1"
        logged = object()

    store = LoggedStore(cast("Store", Accepting()), logging.INFO)
    odd = cast("Any", Odd())
    assert (await store.commit(odd, odd, odd)).applied
    assert "a step of run run-1 could not be logged" in caplog.text
