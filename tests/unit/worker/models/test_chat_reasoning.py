"""Reasoning of compatible servers: readable in the step, sent back where the service wants it."""

from typing import Any

import orjson
import pytest

from stepfleet.orchestrator import LLMResponse, Message, ModelRequest, ToolCall
from stepfleet.orchestrator.errors import ModelError
from stepfleet.worker.models.openai.chat import parse_completion
from stepfleet.worker.models.openai.request import Dialect, request_body
from stepfleet.worker.models.openai.stream import StreamedCompletion

DETAILS = [
    {"type": "reasoning.text", "text": "Let me see.", "signature": "c2ln", "index": 0},
    {"type": "reasoning.encrypted", "data": "AAA", "index": 1},
]


def whole(**fields: Any) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    message = {"role": "assistant", "content": "So.", "tool_calls": [call], **fields}
    return {"model": "m", "choices": [{"message": message, "finish_reason": "tool_calls"}]}


def streamed(*deltas: dict[str, Any]) -> dict[str, Any]:
    answer = StreamedCompletion()
    for one in (*deltas, {"content": "So."}):
        answer.add(orjson.dumps({"choices": [{"delta": one}]}))
    answer.add(b"[DONE]")
    return answer.payload()


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_the_text_is_readable_whoever_sends_it(field: str) -> None:
    pieces = ({field: "Let me"}, {field: " see."})
    for payload in (whole(**{field: "Let me see."}), streamed(*pieces)):
        answer = parse_completion(payload, "m")
        assert (answer.content, answer.reasoning_text) == ("So.", "Let me see.")
        assert answer.reasoning == ()


def test_a_text_without_end_is_cut_in_the_record() -> None:
    answer = parse_completion(whole(reasoning="x" * 1_000_000), "m")
    assert len(answer.reasoning_text) < 17_000
    assert answer.reasoning_text.endswith(" [cut]")


@pytest.mark.parametrize("value", [None, 7, [], [7], {"a": 1}, [{"text": None}]])
def test_what_is_no_text_is_none(value: Any) -> None:
    answer = parse_completion(whole(reasoning=value, reasoning_details=value), "m")
    assert answer.reasoning_text == ""
    streamed({"reasoning": value, "reasoning_details": value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("reasoning_content", "Let me see."), ("reasoning_details", DETAILS),
        ("reasoning_content", ""),
    ],
)  # fmt: skip
def test_it_goes_back_with_its_answer_to_its_own_service_alone(field: str, value: Any) -> None:
    answer = parse_completion(whole(**{field: value}), "m", reasoning=field)
    assert answer.reasoning_text == ("Let me see." if value else "")
    stored = LLMResponse.from_json(answer.to_json())
    call = ToolCall(id="c1", name="look")
    before = Message.assistant("Of another model.", (call,))
    talk = (Message.user("hi"), before, Message.assistant(stored.as_content, (call,)))
    request = ModelRequest(model="m", messages=talk)
    sent = request_body(request, official=False, to=Dialect(reasoning=field))["messages"]
    assert sent[2][field] == value
    assert sent[2]["content"] == "So."
    assert field not in sent[1]
    other = "reasoning_details" if field == "reasoning_content" else "reasoning_content"
    for body in (
        request_body(request, official=True),
        request_body(request, official=False, to=Dialect(reasoning=other)),
    ):
        assert "Let me see." not in str(body)


def test_pieces_of_details_are_joined() -> None:
    payload = streamed(
        {"reasoning_details": [{"type": "reasoning.text", "text": "Let ", "index": 0}]},
        {"reasoning_details": [{"type": "reasoning.text", "text": "me see.", "index": 0}]},
        {"reasoning_details": [{"type": "reasoning.text", "signature": "c2ln", "index": 0}]},
        {"reasoning_details": [{"type": "reasoning.encrypted", "data": "AAA", "index": 1}]},
    )
    message = payload["choices"][0]["message"]
    found = [dict(sorted(one.items())) for one in message["reasoning_details"]]
    assert found == [dict(sorted(one.items())) for one in DETAILS]


THOUGHTS_IN_TEXT = [
    ("<think>hm</think>\n\nSo.", "stop", "So.", "hm"),
    ('\n<think>hm {}</think>{"a": 1}', "stop", '{"a": 1}', "hm {}"),
    ("<think></think>So. </think>", "stop", "So. </think>", ""),
    ("<think>hm</think>\n\n", "stop", "", "hm"),
    ("<think>without end", "length", "", "without end"),
    ("<think>without end", "stop", "<think>without end", ""),
    ("<thinking>hm</thinking>", "stop", "<thinking>hm</thinking>", ""),
    ("So. <think>hm</think>", "stop", "So. <think>hm</think>", ""),
    ("<thi", "length", "<thi", ""),
    ("  \n", "stop", "  \n", ""),
]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(("given", "reason", "text", "thought"), THOUGHTS_IN_TEXT)
def test_a_thought_before_the_text_is_reasoning(
    given: str, reason: str, text: str, thought: str, size: int
) -> None:
    """Whole and streamed; what is told of a stream is the text alone."""
    answer, as_it_came = StreamedCompletion("vllm"), StreamedCompletion("openai")
    pieces = [given[at : at + size] for at in range(0, len(given), size)]
    choices = [
        *({"delta": {"content": one}} for one in pieces),
        {"delta": {}, "finish_reason": reason},
    ]
    told = "".join(answer.add(orjson.dumps({"choices": [one]})) for one in choices)
    raw = "".join(as_it_came.add(orjson.dumps({"choices": [one]})) for one in choices)
    message = {"content": given}
    whole_one = {"choices": [{"message": message, "finish_reason": reason}]}
    for payload in (whole_one, answer.payload()):
        found = parse_completion(payload, "m", service="vllm")
        assert (found.content, found.reasoning_text) == (text, thought)
    assert (told, raw) == (text, given)
    assert parse_completion(whole_one, "m", service="openai").content == given


@pytest.mark.parametrize("given", ["<think>hm</think>\n\nSo.", "<think>hm"])
def test_a_thought_before_calls_goes_back_before_the_text(given: str) -> None:
    answer = parse_completion(whole(content=given), "m", service="vllm")
    assert answer.content == ("So." if "So." in given else "")
    stored = LLMResponse.from_json(answer.to_json())
    talk = (Message.user("hi"), Message.assistant(stored.as_content, stored.tool_calls or ()))
    for model, expected in (("m", given), ("other", answer.content or None)):
        request = ModelRequest(model=model, messages=talk)
        sent = request_body(request, official=False, to=Dialect(service="vllm"))["messages"]
        assert sent[1]["content"] == expected


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (["GOOD ", "STRS"], "GOOD STRS"),
        (["GOOD ", {"type": "text", "text": "PART"}, {"text": None}], "GOOD PART"),
        (42, None), ([42], None), ([{"text": 7}], None),
    ],
)  # fmt: skip
def test_a_content_is_read_alike_whole_and_streamed(content: Any, text: str | None) -> None:
    def read(*, is_streamed: bool) -> str:
        said: dict[str, Any] = {"content": content}
        if not is_streamed:
            return parse_completion(whole(**said, tool_calls=None), "m").content
        answer = StreamedCompletion()
        answer.add(orjson.dumps({"choices": [{"delta": said, "finish_reason": "stop"}]}))
        return parse_completion(answer.payload(), "m").content

    for is_streamed in (False, True):
        if text is not None:
            assert read(is_streamed=is_streamed) == text
            continue
        with pytest.raises(ModelError, match="content is not text"):
            read(is_streamed=is_streamed)
