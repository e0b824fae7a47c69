"""Runs as lines of OpenAI's batch output."""

from datetime import UTC, datetime
from typing import Any

import orjson

from stepfleet.orchestrator import (
    AgentRunResult,
    ErrorInfo,
    ErrorType,
    FinishReason,
    StepResult,
    StopReason,
    UsageStats,
)
from stepfleet.orchestrator.batches.files.openai_format import to_openai_line
from stepfleet.orchestrator.records.errors import refused_answer
from stepfleet.orchestrator.records.run.facts import last_error
from stepfleet.orchestrator.records.run.results import end_state, run_status

RUN = "11111111-2222-3333-4444-555555555555"
AT = datetime(2026, 1, 2, tzinfo=UTC)


def ended(reason: StopReason, *steps: StepResult, **fields: Any) -> AgentRunResult:
    return AgentRunResult(
        run_id=RUN,
        agent_name="openai-batch",
        lifecycle=end_state(reason),
        stop_reason=reason,
        status=run_status(reason),
        steps=steps,
        usage=UsageStats(prompt_tokens=3, completion_tokens=2, total_tokens=5),
        start_time=AT,
        end_time=AT,
        max_iterations=10,
        line_id="r1",
        **fields,
    )


def step(**fields: Any) -> StepResult:
    return StepResult(step=1, started_at=AT, model="gpt-4o-mini-2024", **fields)


def test_a_completed_run_is_a_response_with_a_chat_completion() -> None:
    line = to_openai_line(ended(StopReason.COMPLETED, step(thought="hello"), output="hello"))
    assert line["custom_id"] == "r1"
    assert line["id"].startswith("batch_req_")
    assert line["error"] is None
    assert line["response"]["status_code"] == 200
    assert line["response"]["request_id"] == RUN
    body = line["response"]["body"]
    assert body["object"] == "chat.completion"
    assert body["model"] == "gpt-4o-mini-2024"
    assert body["created"] == int(AT.timestamp())
    assert body["choices"][0]["message"] == {
        "role": "assistant",
        "content": "hello",
        "refusal": None,
    }
    assert body["choices"][0]["finish_reason"] == "stop"
    assert (body["usage"]["prompt_tokens"], body["usage"]["total_tokens"]) == (3, 5)


def test_data_of_an_output_type_is_the_content_as_json() -> None:
    """A tool gave it, with or without a text beside it; the reader has no call to answer."""
    by_tool = step(finish_reason=FinishReason.TOOL_CALLS)
    data = {"category": "lämp", "score": 0.9}
    for text in (None, "Here you are."):
        done = ended(
            StopReason.COMPLETED, by_tool, output=text, structured=data, schema_name="Kind"
        )
        line = to_openai_line(done)
        assert line["error"] is None
        (choice,) = line["response"]["body"]["choices"]
        assert orjson.loads(choice["message"]["content"]) == data
        assert choice["finish_reason"] == "stop"
    without = ended(StopReason.ERROR, by_tool, error="no valid data", schema_name="Kind")
    assert to_openai_line(without)["response"] is None


def test_an_answer_that_was_cut_off_says_so() -> None:
    cut = step(thought="hel", finish_reason=FinishReason.LENGTH)
    line = to_openai_line(ended(StopReason.COMPLETED, cut, output="hel"))
    assert line["response"]["body"]["choices"][0]["finish_reason"] == "length"
    at_limit = to_openai_line(
        ended(StopReason.STEPS_LIMIT, step(thought="so far"), output="so far")
    )
    assert at_limit["response"]["body"]["choices"][0]["finish_reason"] == "length"


def test_a_failed_run_is_an_error_with_the_code_of_its_failure() -> None:
    failure = ErrorInfo(type=ErrorType.RATE_LIMIT, code="RATE_LIMIT_ERROR", message="slow down")
    line = to_openai_line(ended(StopReason.ERROR, step(errors=(failure,)), error="slow down"))
    assert line["response"] is None
    assert line["error"] == {"code": "rate_limit_error", "message": "slow down"}


def test_a_cancelled_run_and_one_at_a_limit_without_text_are_errors() -> None:
    assert to_openai_line(ended(StopReason.USER_REQUESTED))["error"]["code"] == "batch_cancelled"
    assert to_openai_line(ended(StopReason.TIME_LIMIT))["error"]["code"] == "time_limit"


def test_an_active_run_is_reported_as_not_finished() -> None:
    active = ended(StopReason.COMPLETED).model_copy(update={"status": None})
    assert to_openai_line(active)["error"]["code"] == "not_finished"


def test_an_answer_that_was_refused_is_an_error_that_names_the_cause() -> None:
    refused = step(refused=refused_answer("verdict: 'maybe' is no verdict"))
    stopped = ended(StopReason.STEPS_LIMIT, refused, last_error=last_error([refused]))
    line = to_openai_line(stopped)
    assert line["response"] is None
    assert line["error"]["code"] == "answer_refused"
    assert line["error"]["message"].endswith(
        "(steps_limit): answer refused: verdict: 'maybe' is no verdict"
    )
