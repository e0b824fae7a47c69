"""Reasoning of compatible servers: readable in the step, sent back where the service wants it."""

from typing import Any

import orjson
import pytest

from stepfleet.orchestrator import LLMResponse, Message, ModelRequest, ToolCall
from stepfleet.worker.models.openai.answer import parse_completion
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
