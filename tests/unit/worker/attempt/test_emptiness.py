"""An answer without text, calls and refusal is a failed call, with a name and a fix."""

import pytest

from stepfleet.orchestrator import FinishReason, LLMResponse, ModelErrorCode, ToolCall
from stepfleet.worker.attempt.made_calls import no_answer, without_half_a_call

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
        refused = no_answer(called, allowed=allowed)
        assert (refused is not None) == (reason is FinishReason.CONTENT_FILTER)


@pytest.mark.parametrize("text", ["", "Sure, first"])
def test_calls_of_a_refused_answer_are_not_made(text: str) -> None:
    call = ToolCall(id="c", name="look")
    answer = LLMResponse(
        content=text, tool_calls=(call,), finish_reason=FinishReason.CONTENT_FILTER
    )
    error = no_answer(answer, allowed=True)
    assert error is not None
    assert (error.code, error.retryable) == (ModelErrorCode.CONTENT_FILTER, False)
    assert "its tool calls are not executed" in error.message
    assert error.finish_reason is FinishReason.CONTENT_FILTER


def test_the_words_of_a_refusal_are_no_answer_where_a_contract_wants_one() -> None:
    answer = LLMResponse(content="I can't.", finish_reason=FinishReason.CONTENT_FILTER)
    assert no_answer(answer, allowed=False, demanded=False) is None
    error = no_answer(answer, allowed=False, demanded=True)
    assert error is not None
    assert (error.code, error.retryable) == (ModelErrorCode.CONTENT_FILTER, False)
    assert "I can't." in error.message


def test_the_last_call_of_an_answer_that_a_limit_has_cut_is_not_made() -> None:
    calls = (ToolCall(id="a", name="look"), ToolCall(id="b", name="look", error="no JSON"))
    whole = LLMResponse(tool_calls=calls, finish_reason=FinishReason.TOOL_CALLS)
    assert without_half_a_call(whole) is whole
    cut = whole.model_copy(update={"finish_reason": FinishReason.LENGTH})
    first, last = without_half_a_call(cut).tool_calls or ()
    assert first.error is None
    assert last.error is not None
    assert "limit of tokens" in last.error
    assert "no JSON" in last.error


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
