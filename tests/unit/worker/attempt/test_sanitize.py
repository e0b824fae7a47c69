"""What of a model's answer is stored: valid Unicode, within bounds, and readable again."""

import math
from typing import Any

import pytest

from stepfleet.orchestrator import LLMResponse, ToolCall
from stepfleet.orchestrator.errors import ModelError
from stepfleet.orchestrator.records.conversation.messages import Block
from stepfleet.worker.attempt.sanitize import LARGEST_BLOCK, LONGEST_NAME, storable
from stepfleet.worker.models.bodies import reasoning_block


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"a": value}
    return value


def thought(data: Any) -> Block:
    return reasoning_block("anthropic", 0, {"type": "thinking", "thinking": data})


@pytest.mark.parametrize("levels", [120, 220, 300, 5_000])
def test_reasoning_that_is_nested_too_deep_is_left_out(levels: int) -> None:
    kept = thought("because")
    answer = LLMResponse.model_construct(
        content="yes", reasoning=(kept, thought(deep(levels))), model="m"
    )
    stored = storable(answer, parsed=True)
    assert (stored.content, stored.reasoning) == ("yes", (kept,))
    assert LLMResponse.from_json(stored.to_json()) == stored


def test_reasoning_of_any_usual_size_is_kept_as_it_is() -> None:
    blocks = tuple(thought("x" * size) for size in (0, 1_000, LARGEST_BLOCK - 200))
    answer = LLMResponse.model_construct(content="yes", reasoning=blocks, model="m")
    assert storable(answer, parsed=True) is answer


def test_a_block_of_reasoning_that_is_too_large_is_left_out() -> None:
    small = thought("small")
    large = thought("x" * LARGEST_BLOCK)
    answer = LLMResponse.model_construct(content="yes", reasoning=(large, small), model="m")
    assert storable(answer, parsed=True).reasoning == (small,)


def test_all_reasoning_of_an_answer_has_a_bound() -> None:
    blocks = tuple(thought("x" * 900_000) for _ in range(20))
    answer = LLMResponse.model_construct(content="yes", reasoning=blocks, model="m")
    assert len(storable(answer, parsed=True).reasoning) == 4


def test_reasoning_with_what_json_does_not_have_can_be_read_again() -> None:
    block = thought(["half \ud83d", "\ud83d\ude00", math.nan, {"\udfff": 2**70}])
    answer = LLMResponse.model_construct(content="yes", reasoning=(block,), model="m")
    stored = storable(answer, parsed=True)
    said = stored.reasoning[0]["reasoning"]["data"]["thinking"]
    assert said == ["half \\ud83d", "\N{GRINNING FACE}", None, {"\\udfff": 2**70}]
    assert LLMResponse.from_json(stored.to_json()) == stored


@pytest.mark.parametrize("parsed", [False, True])
def test_a_model_s_name_and_a_request_s_id_have_a_bound(*, parsed: bool) -> None:
    answer = LLMResponse(content="yes", model="m" * 1_000_000, request_id="r" * 1_000_000)
    stored = storable(answer, parsed=parsed)
    assert stored.model == ""
    assert stored.request_id == "r" * LONGEST_NAME


@pytest.mark.parametrize(
    "call",
    [
        ToolCall(id="a", name="look", arguments={"at": deep(150)}),
        ToolCall(id="a", name="look", arguments={"at": math.nan}),
        ToolCall(id="a", name="look", arguments={"at": "\ud800"}),
        ToolCall(id="a", name="look", arguments={"at": "x" * 2_000_000}),
        ToolCall(id="a", name="look" * 1_000, arguments={}),
        ToolCall(id="a" * 1_000_000, name="look", arguments={}),
    ],
    ids=["deep", "NaN", "surrogate", "large", "long name", "long id"],
)
def test_a_call_of_a_users_own_model_is_sound_or_answered_with_an_error(call: ToolCall) -> None:
    (stored,) = storable(LLMResponse(tool_calls=(call,), model="m")).tool_calls or ()
    assert len(stored.to_json()) < 2_000
    assert ToolCall.from_json(stored.to_json()) == stored
    assert stored.error is not None or stored.arguments == call.arguments


def test_text_that_only_mentions_nan_is_no_nan() -> None:
    call = ToolCall(id="a", name="look", arguments={"at": "NaN and Infinity"})
    answer = LLMResponse(tool_calls=(call,), model="m")
    assert storable(answer).tool_calls == (call,)


@pytest.mark.parametrize(
    "fields",
    [{"finish_reason": "whatever"}, {"content": 7}, {"cache": object()}, {"reasoning": [1]}],
    ids=["finish_reason", "content", "cache", "reasoning"],
)
def test_an_answer_that_could_not_be_read_again_is_the_models_failure(
    fields: dict[str, Any],
) -> None:
    """It would be paid for, and its run could never be read again."""
    answer = LLMResponse.model_construct(**{"content": "x", "model": "m", **fields})
    with pytest.raises(ModelError, match="the model's answer cannot be stored"):
        storable(answer)
