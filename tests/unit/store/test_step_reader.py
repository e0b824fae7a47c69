"""What claims read of logged steps: kept by the stored text, within a bound."""

from datetime import UTC, datetime

import pytest

from stepfleet.orchestrator.errors import SerializationError
from stepfleet.orchestrator.records.calls.tools import ToolCallRecord
from stepfleet.orchestrator.records.conversation.messages import Message
from stepfleet.orchestrator.records.steps import LoggedStep, StepResult
from stepfleet.orchestrator.store.codec import StepReader, stored_step

NOW = datetime(2026, 7, 1, tzinfo=UTC)


def logged(step: int, text: str) -> LoggedStep:
    call = ToolCallRecord(tool_name="look", call_id=f"c{step}", result=text, timestamp=NOW)
    result = StepResult(step=step + 1, tool_calls=(call,), started_at=NOW)
    return LoggedStep(result=result, messages=(Message.assistant(text),))


def log_of(*texts: str) -> dict[str, str]:
    return {str(n): stored_step(logged(n, text)) for n, text in enumerate(texts)}


def test_a_step_is_read_once_however_often_its_run_is_claimed() -> None:
    reader = StepReader()
    (first,), _ = reader.said(log_of("a"))
    (again, second), calls = reader.said(log_of("a", "b"))

    assert again is first
    assert [one[0].text for one in (first, second)] == ["a", "b"]
    assert [one.result for one in calls] == ["a", "b"]


def test_a_step_that_was_taken_back_and_made_anew_is_read_anew() -> None:
    reader = StepReader()
    reader.said(log_of("a", "b"))
    said, calls = reader.said(log_of("a", "c"))

    assert [one[0].text for one in said] == ["a", "c"]
    assert [one.result for one in calls] == ["a", "c"]


def test_what_was_not_read_for_longest_goes_first() -> None:
    reader = StepReader(most=2 * len(logged(0, "a" * 100).to_json()) + 50)
    (kept,), _ = reader.said(log_of("a" * 100))
    (gone,), _ = reader.said(log_of("b" * 100))
    reader.said(log_of("a" * 100))
    reader.said(log_of("c" * 100))

    assert reader.said(log_of("a" * 100))[0][0] is kept
    assert reader.said(log_of("b" * 100))[0][0] is not gone


def test_a_log_beyond_the_bound_is_read_whole() -> None:
    said, calls = StepReader(most=10).said(log_of("a", "b", "c"))

    assert [one[0].text for one in said] == ["a", "b", "c"]
    assert len(calls) == 3


def test_a_damaged_step_is_refused_each_time() -> None:
    reader = StepReader()
    for _ in range(2):
        with pytest.raises(SerializationError, match="a record of the run cannot be read"):
            reader.said({"0": '{"messages":[{"role":"nobody"}]}'})
