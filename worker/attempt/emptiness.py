"""Which answers are none: no text, no call, no refusal in words, or broken off. Pure.

And which call is none: that at which an answer was cut.

Judged on the answer as its model gave it, before anything of the agent reads it.
"""

from stepfleet.orchestrator.errors import ModelError
from stepfleet.orchestrator.records.errors import ModelErrorCode
from stepfleet.orchestrator.records.responses import LLMResponse
from stepfleet.orchestrator.records.steps import FinishReason

_LONGEST_WORDS = 500
_CUT = (
    "the answer reached its limit of tokens (settings.max_tokens), perhaps within this call: it was"
    " not executed. Call again, with shorter arguments"
)
_ENDED_BY_THE_MODEL = (FinishReason.STOP, FinishReason.TOOL_CALLS, FinishReason.OTHER)


def no_answer(response: LLMResponse, *, allowed: bool, demanded: bool = False) -> ModelError | None:
    """Return the failure of a call whose answer is empty or broken off; None where there is one.

    `allowed` is the agent's `allow_empty_answer`: it accepts those that the model has ended itself.
    `demanded`: the run wants an answer by its contract, which the words of a refusal are not. Calls
    of an answer that was refused are not made.
    What a filter withheld, or a limit of tokens cut, would be so again: it is not retried.
    """
    reason, text = response.finish_reason, response.content
    has_content = bool(response.tool_calls) or bool(text and not text.isspace())
    is_refused = reason is FinishReason.CONTENT_FILTER and (demanded or bool(response.tool_calls))
    if has_content and reason is not FinishReason.ERROR and not is_refused:
        return None
    if reason is FinishReason.PAUSE:  # half a turn, with calls of the provider's own tools
        return None
    if allowed and reason in _ENDED_BY_THE_MODEL:
        return None
    error = _failure(response)
    error.finish_reason = reason
    if response.request_id:
        error.name_request(response.request_id)
    return error


def without_half_a_call(response: LLMResponse) -> LLMResponse:
    """Return the answer with an error in its last call, where a limit of tokens has cut it.

    Some services send the arguments as far as they came, and these may be sound JSON.
    """
    calls = response.tool_calls
    if response.finish_reason is not FinishReason.LENGTH or not calls:
        return response
    why = f"{_CUT} ({calls[-1].error})" if calls[-1].error else _CUT
    last = calls[-1].model_copy(update={"error": why})
    return response.model_copy(update={"tool_calls": (*calls[:-1], last)})


def _failure(response: LLMResponse) -> ModelError:
    reason = response.finish_reason
    thought = " after it had reasoned" if response.reasoning or response.reasoning_text else ""
    named = f"finish reason {reason.value}"
    if reason is FinishReason.ERROR:
        return ModelError(
            f"the model broke its answer off ({named})",
            retryable=True,
            code=ModelErrorCode.MALFORMED_ANSWER,
        )
    if reason is FinishReason.CONTENT_FILTER:
        text = response.content.strip()[:_LONGEST_WORDS]
        said = f": {text!r}" if text else " without any text"
        calls = ", and its tool calls are not executed" if response.tool_calls else ""
        return ModelError(
            f"the answer was refused{said} ({named}){calls}: change the input",
            code=ModelErrorCode.CONTENT_FILTER,
        )
    if reason is FinishReason.LENGTH:
        return ModelError(
            f"the answer was cut at its limit of tokens before any text{thought} ({named}): "
            "raise settings.max_tokens, or lower the reasoning",
            code=ModelErrorCode.EMPTY_ANSWER,
        )
    if response.unread:  # the same request gets it again, and each time for money
        return ModelError(
            f"the answer has {response.unread} and no text ({named}): an answer is text and calls "
            "of the agent's tools. Ask for text in settings.extra_body or take another model; with "
            "allow_empty_answer=True its text is empty",
            code=ModelErrorCode.INVALID_REQUEST,
        )
    return ModelError(
        f"the answer is empty: no text and no tool call{thought} ({named}). An agent that wants "
        "empty answers has allow_empty_answer=True",
        retryable=True,
        code=ModelErrorCode.EMPTY_ANSWER,
    )
