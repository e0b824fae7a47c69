"""Valid answers of every protocol with something changed: each is an answer or a named failure.

What is changed is drawn: a field is gone, null, empty, huge, deep, of another type, there twice or
in another order; an event is gone, there twice or in another place; the bytes are cut, with other
line ends, a byte order mark or another content type.
"""

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.servers.answer_desk import AnswerDesk, answer_desk
from support.servers.raw_model_server import reply

from stepfleet.orchestrator import LLMResponse, ModelErrorCode
from stepfleet.orchestrator.errors import ModelError
from stepfleet.worker.testing.bedrock import frame

BOM = b"\xef\xbb\xbf"
JSON, SSE, FRAMES = "application/json", "text/event-stream", "application/vnd.amazon.eventstream"
LONGEST_ERROR = 4_000


@dataclass
class Stream:
    """The events of an answer, and how they are written."""

    events: list[tuple[str, Any]]
    newline: bytes = b"\n"
    named: bool = True


def events(stream: Stream) -> bytes:
    """Return server-sent events."""
    end, lines = stream.newline, b""
    for name, data in stream.events:
        lines += b"event: " + name.encode() + end if name and stream.named else b""
        text = data if isinstance(data, bytes) else encoded(data)
        lines += b"data: " + text + end + end
    return lines


def frames(stream: Stream) -> bytes:
    """Return AWS's frames."""
    return b"".join(
        frame(name, data if isinstance(data, bytes) else encoded(data))
        for name, data in stream.events
    )


def encoded(value: Any) -> bytes:
    """Return a value as JSON, what is deep as deep as the parser takes it."""
    return json.dumps(value).encode().replace(b'"deep"', b"[" * 1_000 + b"]" * 1_000)


@dataclass(frozen=True)
class Kind:
    """A protocol: answers of it, and the events of the same, each with its name."""

    model: str
    answers: tuple[dict[str, Any], ...]
    streams: tuple[tuple[tuple[str, Any], ...], ...]
    encode: Callable[[Stream], bytes] = events
    type: str = SSE


def chat() -> Kind:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}
    usage = {"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13}
    details = [{"type": "reasoning.text", "text": "Hm.", "index": 0}]

    def answer(reason: str, **message: Any) -> dict[str, Any]:
        choice = {"index": 0, "finish_reason": reason, "message": {"role": "assistant", **message}}
        return {"id": "x", "model": "m-1", "choices": [choice], "usage": usage}

    def piece(reason: str | None = None, **delta: Any) -> tuple[str, Any]:
        return "", {"id": "x", "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}

    begun = {**call, "index": 0, "function": {"name": "look", "arguments": '{"a"'}}
    rest = {"index": 0, "function": {"arguments": ": 1}"}}
    return Kind(
        "openai:m",
        (
            answer("stop", content="Hello", reasoning_content="Hm."),
            answer("stop", content=[{"type": "text", "text": "Hello"}], refusal=None),
            answer("tool_calls", content=None, tool_calls=[call], reasoning_details=details),
            answer("function_call", content="x", function_call={"name": "f", "arguments": "{}"}),
        ),
        (
            (piece(role="assistant", content=""), piece(content="Hel"), piece(content="lo"),
             piece("stop"), ("", {"choices": [], "usage": usage}), ("", b"[DONE]")),
            (piece(reasoning="Hm."), piece(tool_calls=[begun]), piece(tool_calls=[rest]),
             piece("tool_calls", reasoning_details=details), ("", b"[DONE]")),
        ),
    )  # fmt: skip


def messages() -> Kind:
    usage = {"input_tokens": 9, "output_tokens": 4, "cache_read_input_tokens": 2}
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "c2ln"}
    search = {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"q": "x"}}
    call = {"type": "tool_use", "id": "t1", "name": "look", "input": {"a": 1}}
    text = {"type": "text", "text": "Hello"}

    def answer(reason: str, *content: dict[str, Any]) -> dict[str, Any]:
        head = {"id": "m", "type": "message", "role": "assistant", "model": "m-1"}
        return {**head, "content": list(content), "stop_reason": reason, "usage": usage}

    def told(kind: str, **fields: Any) -> tuple[str, Any]:
        return kind, {"type": kind, **fields}

    def begun(index: int, **block: Any) -> tuple[str, Any]:
        return told("content_block_start", index=index, content_block=block)

    def delta(index: int, **piece: Any) -> tuple[str, Any]:
        return told("content_block_delta", index=index, delta=piece)

    return Kind(
        "anthropic:m",
        (
            answer("end_turn", thought, text, {"type": "redacted_thinking", "data": "zz"}),
            answer("tool_use", thought, text, call),
            answer("pause_turn", text, search),
        ),
        (
            (
                told("message_start", message=answer("end_turn")),
                begun(0, type="thinking", thinking="", signature=""),
                delta(0, type="thinking_delta", thinking="Hm."),
                delta(0, type="signature_delta", signature="c2ln"),
                begun(1, type="text", text=""), told("ping"),
                delta(1, type="text_delta", text="Hello"),
                delta(1, type="citations_delta", citation={"url": "x"}),
                begun(2, type="tool_use", id="t1", name="look", input={}),
                delta(2, type="input_json_delta", partial_json='{"a": 1}'),
                told("content_block_stop", index=2),
                told("message_delta", delta={"stop_reason": "tool_use"}, usage=usage),
                told("message_stop"),
            ),
        ),
    )  # fmt: skip


def gemini() -> Kind:
    usage = {
        "promptTokenCount": 9,
        "candidatesTokenCount": 4,
        "promptTokensDetails": [{"modality": "AUDIO", "tokenCount": 1}],
    }
    call = {"functionCall": {"name": "look", "args": {"a": 1}}, "thoughtSignature": "c2ln"}
    thought = {"text": "Hm.", "thought": True}

    def answer(reason: str | None, *parts: dict[str, Any]) -> dict[str, Any]:
        candidate = {"content": {"parts": list(parts), "role": "model"}, "finishReason": reason}
        return {"candidates": [candidate], "usageMetadata": usage, "modelVersion": "m-1"}

    return Kind(
        "google:m",
        (
            answer("STOP", thought, {"text": "Hello", "thoughtSignature": "c2ln"}),
            answer("STOP", {"text": "Let me see."}, call),
            {"promptFeedback": {"blockReason": "SAFETY"}, "usageMetadata": usage},
        ),
        (
            (("", answer(None, thought)), ("", answer(None, {"text": "Hel"})),
             ("", answer("STOP", {"text": "lo"}, call))),
        ),
    )  # fmt: skip


def converse() -> Kind:
    usage = {"inputTokens": 9, "outputTokens": 4, "totalTokens": 13}
    thought = {"reasoningContent": {"reasoningText": {"text": "Hm.", "signature": "c2ln"}}}
    hidden = {"reasoningContent": {"redactedContent": "enp6"}}
    call = {"toolUse": {"toolUseId": "t1", "name": "look", "input": {"a": 1}}}
    cited = {"citationsContent": {"content": [{"text": "Hello"}]}}

    def answer(reason: str, *content: dict[str, Any]) -> dict[str, Any]:
        message = {"role": "assistant", "content": list(content)}
        return {"output": {"message": message}, "stopReason": reason, "usage": usage}

    def delta(index: int, **piece: Any) -> tuple[str, Any]:
        return "contentBlockDelta", {"contentBlockIndex": index, "delta": piece}

    begun = {"contentBlockIndex": 1, "start": {"toolUse": {"toolUseId": "t1", "name": "look"}}}
    return Kind(
        "bedrock:anthropic.claude-x",
        (
            answer("end_turn", thought, {"text": "Hello"}, cited),
            answer("tool_use", hidden, {"text": "Let me see."}, call),
        ),
        (
            (
                ("messageStart", {"role": "assistant"}),
                delta(0, reasoningContent={"text": "Hm."}),
                delta(0, reasoningContent={"signature": "c2ln"}),
                ("contentBlockStart", begun),
                delta(1, toolUse={"input": '{"a": 1}'}),
                delta(2, text="Hello"),
                delta(3, reasoningContent={"redactedContent": "enp6"}),
                delta(3, reasoningContent={"redactedContent": "enp6"}),
                ("messageStop", {"stopReason": "tool_use"}),
                ("metadata", {"usage": usage}),
            ),
        ),
        frames,
        FRAMES,
    )


def responses() -> Kind:
    usage = {"input_tokens": 9, "output_tokens": 4, "total_tokens": 13}
    summary = [{"type": "summary_text", "text": "Hm."}]
    thought = {"type": "reasoning", "id": "r", "encrypted_content": "zz", "summary": summary}
    text = {"type": "message", "content": [{"type": "output_text", "text": "Hello"}]}
    refusal = {"type": "message", "content": [{"type": "refusal", "refusal": "No."}]}
    call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"a": 1}'}

    def answer(status: str, *output: dict[str, Any]) -> dict[str, Any]:
        head = {"id": "r1", "model": "m-1", "status": status, "error": None}
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {**head, "output": list(output), "usage": usage, "incomplete_details": cut}

    def told(kind: str, **fields: Any) -> tuple[str, Any]:
        return kind, {"type": kind, **fields}

    return Kind(
        "openai-responses:m",
        (
            answer("completed", thought, text),
            answer("completed", thought, text, call),
            answer("incomplete", refusal),
        ),
        (
            (
                told("response.created", response=answer("in_progress")),
                told("response.output_item.done", output_index=0, item=thought),
                told("response.output_text.delta", output_index=1, delta="Hello"),
                told("response.output_item.done", output_index=1, item=text),
                told("response.function_call_arguments.delta", output_index=2, delta="{}"),
                told("response.output_item.done", output_index=2, item=call),
                told("response.completed", response=answer("completed")),
            ),
        ),
    )


KINDS = [chat(), messages(), gemini(), converse(), responses()]


def deep(levels: int) -> Any:
    value: Any = []
    for level in range(levels):
        value = {"a": value} if level % 2 else [value]
    return value


DEEPEST = 8
JUNK: tuple[Callable[[], Any], ...] = (
    lambda: None,
    lambda: "",
    lambda: "moonlight",
    lambda: "error",
    lambda: "\N{LATIN SMALL LETTER E WITH ACUTE}\x00",
    lambda: "x" * 70_000,
    lambda: 0,
    lambda: -1,
    lambda: True,
    lambda: 10**30,
    lambda: 1e308,
    list,
    dict,
    lambda: [{}],
    lambda: [None, 7, "x"],
    lambda: [{"type": "text"} for _ in range(3_000)],
    lambda: {"type": "text", "text": {"a": 1}},
    lambda: {"error": {"message": "no", "code": 503}},
    lambda: deep(40),
    lambda: deep(400),
    lambda: "deep",
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of what a value holds, except in what was put there by the thousand."""
    yield path
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value[:8])
    for key, inner in items if len(path) < DEEPEST else ():
        yield from places(inner, (*path, key))


def changed(value: Any, data: st.DataObject) -> Any:
    """Return the value with something of it changed."""
    whole = [copy.deepcopy(value)]
    path = data.draw(st.sampled_from([one for one in places(value) if one]))
    at: Any = whole[0]
    for key in path[:-1]:
        at = at[key]
    last = path[-1]
    match data.draw(st.sampled_from(("junk", "junk", "gone", "twice", "turned", "more"))):
        case "gone":
            del at[last]
        case "twice" if isinstance(at, list):
            at.insert(last, copy.deepcopy(at[last]))
        case "turned" if isinstance(at, list):
            at.reverse()
        case "more" if isinstance(at, dict):
            at[data.draw(st.sampled_from(("x", "error", "message", "detail", "type")))] = (
                copy.deepcopy(at[last])
            )
        case _:
            at[last] = data.draw(st.sampled_from(JUNK))()
    return whole[0]


def rearranged(stream: Stream, data: st.DataObject) -> None:
    """Change something of the events."""
    listed, at = stream.events, data.draw(st.integers(0, len(stream.events) - 1))
    match data.draw(st.sampled_from(("gone", "twice", "swapped", "junk", "changed", "changed"))):
        case "gone" if len(listed) > 1:
            del listed[at]
        case "twice":
            listed.insert(at, listed[at])
        case "swapped":
            listed[at], listed[0] = listed[0], listed[at]
        case "junk":
            junk = data.draw(st.sampled_from((b"", b"{", b"[]", b"7", b"words", b"null", b"{}")))
            name = data.draw(st.sampled_from(("", "error", listed[at][0])))
            listed.insert(at, (name, junk))
        case _:
            name, event = listed[at]
            if isinstance(event, dict) and event:
                listed[at] = name, changed(event, data)


@pytest.fixture(scope="module")
def desk() -> Iterator[AnswerDesk]:
    with answer_desk() as desk:
        yield desk


def ask(desk: AnswerDesk, kind: Kind, body: bytes, label: str | None, *, stream: bool) -> Any:
    return desk.ask(kind.model, reply(200, body, {"Content-Type": label or ""}), stream=stream)


def judge(outcome: Any) -> None:
    """Check that a failure is one that people can read; an answer is one."""
    if isinstance(outcome, ModelError):
        assert 0 < len(str(outcome)) < LONGEST_ERROR
        assert outcome.code != "OPENAI_ERROR"
        assert outcome.__cause__ is None


EXAMPLES = settings(
    max_examples=120, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
)
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.model)


@kinds
def test_the_answers_as_they_are_become_texts_and_calls(kind: Kind, desk: AnswerDesk) -> None:
    for answer in kind.answers:
        outcome = ask(desk, kind, encoded(answer), JSON, stream=False)
        if "promptFeedback" in answer:
            assert outcome.code == ModelErrorCode.CONTENT_FILTER
        else:
            assert isinstance(outcome, LLMResponse)
    for stream in kind.streams:
        outcome = ask(desk, kind, kind.encode(Stream(list(stream))), kind.type, stream=True)
        assert isinstance(outcome, LLMResponse)
        assert outcome.content or outcome.tool_calls


@kinds
@EXAMPLES
@given(data=st.data())
def test_a_changed_answer_is_an_answer_or_a_named_failure(
    kind: Kind, desk: AnswerDesk, data: st.DataObject
) -> None:
    """LLM-17"""
    answer: Any = data.draw(st.sampled_from(kind.answers))
    for _ in range(data.draw(st.integers(1, 3))):
        if isinstance(answer, dict) and answer:
            answer = changed(answer, data)
    body = encoded(answer)
    if data.draw(st.booleans()):
        body = body[: data.draw(st.integers(0, len(body)))]
    judge(ask(desk, kind, body, JSON, stream=data.draw(st.booleans())))


@kinds
@EXAMPLES
@given(data=st.data())
def test_a_changed_stream_is_an_answer_or_a_named_failure(
    kind: Kind, desk: AnswerDesk, data: st.DataObject
) -> None:
    """LLM-17"""
    stream = Stream(list(data.draw(st.sampled_from(kind.streams))))
    stream.newline = data.draw(st.sampled_from((b"\n", b"\r", b"\r\n")))
    stream.named = data.draw(st.booleans())
    for _ in range(data.draw(st.integers(1, 3))):
        rearranged(stream, data)
    body = kind.encode(stream)
    if data.draw(st.booleans()):
        body = body[: data.draw(st.integers(0, len(body)))]
    judge(ask(desk, kind, body, kind.type, stream=True))


@kinds
@pytest.mark.parametrize("newline", [b"\n", b"\r", b"\r\n"])
@pytest.mark.parametrize("mark", [b"", BOM])
@pytest.mark.parametrize(
    "label", [None, SSE.upper(), "application/octet-stream", "text/plain", JSON]
)
def test_a_stream_is_known_by_its_bytes(
    kind: Kind, desk: AnswerDesk, label: str | None, mark: bytes, newline: bytes
) -> None:
    if kind.type is FRAMES:
        mark = b""  # which only texts have
    for one in kind.streams:
        sound = ask(desk, kind, kind.encode(Stream(list(one))), kind.type, stream=True)
        body = mark + kind.encode(Stream(list(one), newline))
        for stream in (True, False):
            outcome = ask(desk, kind, body, label, stream=stream)
            assert isinstance(outcome, LLMResponse)
            same = {"raw", "tool_calls"}
            assert outcome.model_dump(exclude=same) == sound.model_dump(exclude=same)
            calls, known = (each.tool_calls or () for each in (outcome, sound))
            assert [call.arguments for call in calls] == [call.arguments for call in known]


@kinds
@pytest.mark.parametrize("mark", [b"", BOM, b"\n \r\n"])
@pytest.mark.parametrize("label", [None, "application/octet-stream", SSE, FRAMES, JSON.upper()])
def test_a_whole_answer_is_known_by_its_bytes(
    kind: Kind, desk: AnswerDesk, label: str | None, mark: bytes
) -> None:
    for answer in kind.answers:
        sound = ask(desk, kind, encoded(answer), JSON, stream=False)
        outcome = ask(desk, kind, mark + encoded(answer), label, stream=True)
        if isinstance(sound, ModelError):
            assert (outcome.code, outcome.message) == (sound.code, sound.message)
            continue
        assert isinstance(outcome, LLMResponse)
        assert (outcome.content, outcome.finish_reason) == (sound.content, sound.finish_reason)
        assert len(outcome.tool_calls or ()) == len(sound.tool_calls or ())
