"""An answer without text, calls and refusal is a failed call, with a name and a fix."""

import pytest

from stepfleet.orchestrator import FinishReason, LLMResponse, ModelErrorCode, ToolCall
from stepfleet.worker.attempt.emptiness import no_answer

BLANK = ["", " ", "\n\t \u00a0\u2003"]


@pytest.mark.parametrize("text", BLANK)
@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.TOOL_CALLS, FinishReason.OTHER])
def test_a_blank_answer_is_a_failure_that_may_pass(text: str, reason: FinishReason) -> None:
    error = no_answer(LLMResponse(content=text, finish_reason=reason), allowed=False)
    assert error is not None
    assert (error.code, error.retryable) == (ModelErrorCode.EMPTY_ANSWER, True)
    assert f"finish reason {reason.value}" in error.message
    assert "allow_empty_answer=True" in error.message
    assert error.finish_reason is reason


@pytest.mark.parametrize("text", BLANK)
def test_an_agent_that_wants_empty_answers_gets_them(text: str) -> None:
    assert no_answer(LLMResponse(content=text), allowed=True) is None


@pytest.mark.parametrize("allowed", [False, True])
def test_text_or_a_call_is_an_answer_however_it_ended(allowed: bool) -> None:
    call = ToolCall(id="c", name="look", error="its arguments are no JSON")
    for reason in set(FinishReason) - {FinishReason.ERROR}:
        told = LLMResponse(content=".", finish_reason=reason)
        called = LLMResponse(tool_calls=(call,), finish_reason=reason)
        assert no_answer(told, allowed=allowed) is None
        assert no_answer(called, allowed=allowed) is None


@pytest.mark.parametrize("allowed", [False, True])
def test_an_answer_that_a_limit_or_a_filter_took_away_is_not_asked_again(allowed: bool) -> None:
    cut = no_answer(LLMResponse(finish_reason=FinishReason.LENGTH), allowed=allowed)
    assert cut is not None
    assert (cut.code, cut.retryable) == (ModelErrorCode.EMPTY_ANSWER, False)
    assert "raise settings.max_tokens" in cut.message
    kept = no_answer(LLMResponse(finish_reason=FinishReason.CONTENT_FILTER), allowed=allowed)
    assert kept is not None
    assert (kept.code, kept.retryable) == (ModelErrorCode.CONTENT_FILTER, False)


@pytest.mark.parametrize("text", ["", "half of it"])
def test_an_answer_that_its_model_broke_off_is_asked_again(text: str) -> None:
    broken = LLMResponse(content=text, finish_reason=FinishReason.ERROR)
    error = no_answer(broken, allowed=True)
    assert error is not None
    assert (error.code, error.retryable) == (ModelErrorCode.MALFORMED_ANSWER, True)


def test_reasoning_alone_is_no_answer_and_the_providers_request_is_named() -> None:
    response = LLMResponse(reasoning_text="let me think", request_id="req_7")
    error = no_answer(response, allowed=False)
    assert error is not None
    assert "after it had reasoned" in error.message
    assert error.message.endswith("(request req_7)")


def test_an_answer_of_what_is_not_read_is_not_bought_again() -> None:
    error = no_answer(LLMResponse(unread="an image"), allowed=False)
    assert error is not None
    assert (error.code, error.retryable) == (ModelErrorCode.INVALID_REQUEST, False)
    assert "has an image and no text" in error.message
    assert no_answer(LLMResponse(unread="an image"), allowed=True) is None
    assert no_answer(LLMResponse(content="a", unread="an image"), allowed=False) is None
