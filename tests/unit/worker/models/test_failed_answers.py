"""Answers with status 200 that are none: what the server says of it becomes the call's failure."""

from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from support.servers.answer_desk import AnswerDesk, answer_desk
from support.servers.raw_model_server import Script, completion_body, raw, reply

from stepfleet.orchestrator import FinishReason, LLMResponse, ModelErrorCode
from stepfleet.orchestrator.errors import ModelError
from stepfleet.worker.testing.bedrock import FRAMES, frame

C = ModelErrorCode
CHAT, CLAUDE, GEMINI = "openai:m", "anthropic:m", "google:m"
CONVERSE, RESPONSES = "bedrock:anthropic.claude-x", "openai-responses:m"
USAGE = {"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13}


@pytest.fixture(scope="module")
def desk() -> Iterator[AnswerDesk]:
    with answer_desk() as desk:
        yield desk


def lines(text: bytes) -> Script:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
    return raw(head + text)


def events(*payloads: Any) -> Script:
    return lines(b"".join(b"data: " + orjson.dumps(payload) + b"\n\n" for payload in payloads))


def choice(**fields: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": "Half an ans"}
    return {"choices": [{"index": 0, "message": message, **fields}], "usage": USAGE}


STATED: dict[str, tuple[Any, ModelErrorCode, str]] = {
    "in a choice": (choice(error={"code": 502, "message": "behind me"}), C.SERVER_ERROR,
                    "502: behind me"),
    "a limit in a choice": (choice(error={"code": 429, "message": "slow"}), C.RATE_LIMIT, "slow"),
    "of one word": (choice(finish_reason="error"), C.SERVER_ERROR, "'error'"),
    "of no word": (choice(error="", finish_reason="error"), C.SERVER_ERROR, "'error'"),
    "an abort": (choice(finish_reason="abort"), C.SERVER_ERROR, "'abort'"),
    "beside choices": ({**choice(), "error": {"message": "oops"}}, C.SERVER_ERROR, "oops"),
    "as an object": ({"object": "error", "message": "no such thing", "code": 400},
                     C.INVALID_REQUEST, "no such thing"),
    "a detail": ({"detail": "went wrong"}, C.SERVER_ERROR, "went wrong"),
    "details": ({"detail": [{"loc": ["body"], "msg": "field required"}]}, C.SERVER_ERROR,
                "field required"),
    "code and msg": ({"code": 1302, "msg": "rate limit exceeded"}, C.RATE_LIMIT, "rate limit"),
    "MiniMax's": ({"base_resp": {"status_code": 1008, "status_msg": "insufficient balance"}},
                  C.QUOTA_EXHAUSTED, "insufficient balance"),
    "Cloudflare's": ({"success": False, "errors": [{"code": 5007, "message": "No such model"}],
                      "result": None}, C.MODEL_NOT_FOUND, "No such model"),
    "within another": ({"error": {"error": {"message": "inner", "code": 503}}}, C.SERVER_ERROR,
                       "503: inner"),
    "a name and words": ({"error": "Internal Server Error", "message": "disk full"},
                         C.SERVER_ERROR, "Internal Server Error: disk full"),
    "a server behind": ({"error": {"message": "Provider returned error", "code": 400, "metadata": {
        "raw": "maximum context length is 4096 tokens"}}}, C.CONTEXT_OVERFLOW, "4096"),
}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("case", STATED)
def test_a_failure_that_an_answer_states_has_its_code_and_the_servers_words(
    case: str, desk: AnswerDesk, stream: bool
) -> None:
    """LLM-06, LLM-17"""
    payload, code, words = STATED[case]
    failure = desk.ask(CHAT, events(payload) if stream else reply(200, payload), stream=stream)
    assert isinstance(failure, ModelError)
    assert failure.code == code
    assert words in failure.message
    if "usage" in payload:  # what it has cost goes to the ledger
        assert failure.usage is not None
        assert (failure.usage.total_tokens, failure.received is not None) == (13, True)


SAID_IN_LINES: dict[str, tuple[bytes, str]] = {
    "words": (b"event: error\ndata: out of memory\n\n", "out of memory"),
    "a detail": (b'event: error\ndata: {"detail": "out of memory"}\n\n', "out of memory"),
    "a message": (b'event: error\ndata: {"message": "out of memory"}\n\n', "out of memory"),
    "an error": (b'event: error\ndata: {"error": {"message": "of memory"}}\n\n', "of memory"),
    "a line": (b'error: {"code": 500, "message": "of memory"}\n\n', "500: of memory"),
    "a line of words": (b"error: out of memory\r\n\r\n", "out of memory"),
    "bare JSON": (
        b'{\n  "error": {\n    "code": 503,\n    "message": "out of memory"\n  }\n}\n',
        "503: out of memory",
    ),
    "502 in a choice": (
        b'data: {"choices": [{"delta": {}, "error": {"code": 502, "message": "down"}}]}\n\n',
        "502: down",
    ),
}
BEGUN: dict[str, bytes] = {
    CHAT: b'data: {"choices": [{"delta": {"content": "Hel"}}]}\n\n',
    CLAUDE: b'data: {"type": "message_start", "message": {}}\n\n',
    GEMINI: b'data: {"candidates": [{"content": {"parts": [{"text": "Hel"}]}}]}\n\n',
    RESPONSES: b'data: {"type": "response.output_text.delta", "delta": "Hel"}\n\n',
}


@pytest.mark.parametrize("case", SAID_IN_LINES)
@pytest.mark.parametrize("model", BEGUN)
@pytest.mark.parametrize("begun", [True, False], ids=["late", "at once"])
def test_a_failure_in_a_stream_has_the_servers_words(
    model: str, case: str, begun: bool, desk: AnswerDesk
) -> None:
    text, words = SAID_IN_LINES[case]
    if case.startswith("502") and model != CHAT:
        return
    failure = desk.ask(model, lines(BEGUN[model] * begun + text), stream=True)
    assert isinstance(failure, ModelError)
    assert words in failure.message
    assert failure.retryable


@pytest.mark.parametrize("status", ["queued", "in_progress", "failed", "cancelled"])
def test_a_response_that_has_not_ended_is_no_answer(status: str, desk: AnswerDesk) -> None:
    usage = {"input_tokens": 9, "output_tokens": 4}
    failure = desk.ask(
        RESPONSES, reply(200, {"status": status, "output": [], "usage": usage}), stream=False
    )
    assert isinstance(failure, ModelError)
    assert (failure.retryable, failure.code, status in failure.message) == (
        True, C.SERVER_ERROR, True,
    )  # fmt: skip
    assert failure.usage is not None


def gemini(reason: str, **fields: Any) -> dict[str, Any]:
    return {"candidates": [{"finishReason": reason, **fields}]}


def converse(reason: str, *blocks: dict[str, Any]) -> dict[str, Any]:
    counts = {"inputTokens": 9, "outputTokens": 4}
    return {
        "output": {"message": {"content": [*blocks]}}, "stopReason": reason, "usage": counts,
    }  # fmt: skip


COUNTS = {"usageMetadata": {"promptTokenCount": 9, "candidatesTokenCount": 4}}
COUNTED = {"usage": {"input_tokens": 9, "output_tokens": 4}}
BLOCKED: dict[str, tuple[str, dict[str, Any], str]] = {
    "Gemini's image": (
        GEMINI,
        gemini("IMAGE_SAFETY", finishMessage="An image.") | COUNTS,
        "An image. (finishReason IMAGE_SAFETY)",
    ),
    "Gemini's language": (GEMINI, gemini("LANGUAGE", content={}) | COUNTS, "finishReason LANGUAGE"),
    "Gemini's call": (
        GEMINI,
        gemini("SAFETY", content={"parts": [{"functionCall": {"name": "look"}}]}) | COUNTS,
        "finishReason SAFETY",
    ),
    "Gemini's prompt": (
        GEMINI,
        {"promptFeedback": {"blockReason": "OTHER", "blockReasonMessage": "No."}} | COUNTS,
        "No. (blockReason OTHER)",
    ),
    "Claude's": (CLAUDE, {"content": [], "stop_reason": "refusal"} | COUNTED, "reason refusal"),
    "Claude's in words": (
        CLAUDE,
        {
            "content": [],
            "stop_reason": "refusal",
            "stop_details": {"category": "cyber", "explanation": "Misuse."},
            **COUNTED,
        },
        "Misuse. (stop reason refusal, category cyber)",
    ),
    "Bedrock's": (CONVERSE, converse("content_filtered"), "stopReason content_filtered"),
    "Bedrock's guardrail": (
        CONVERSE, converse("guardrail_intervened"), "stopReason guardrail_intervened",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BLOCKED)
def test_content_that_a_service_withheld_is_a_failure_with_its_reason_and_words(
    case: str, desk: AnswerDesk
) -> None:
    model, payload, words = BLOCKED[case]
    failure = desk.ask(model, reply(200, payload), stream=False)
    assert isinstance(failure, ModelError)
    assert (failure.code, failure.retryable) == (C.CONTENT_FILTER, False)
    assert failure.finish_reason is FinishReason.CONTENT_FILTER
    assert words in failure.message
    assert failure.usage is not None
    assert failure.usage.total_tokens == 13


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a model's words": (
        CHAT,
        choice(finish_reason="stop", message={"refusal": "I will not."}),
        "I will not.",
    ),
    "Claude's words": (
        CLAUDE,
        {"content": [{"type": "text", "text": "I will not."}], "stop_reason": "refusal"},
        "I will not.",
    ),
    "a compatible server's": (CHAT, choice(finish_reason="content-filter", message={}), ""),
    "a compatible server's, bare": (
        CHAT,
        {"choices": [{"index": 0, "finish_reason": "content_filter"}]},
        "",
    ),
    "a response's": (
        RESPONSES,
        {"status": "incomplete", "incomplete_details": {"reason": "content_filter"}, "output": []},
        "",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_is_named_as_one_and_has_the_models_words(case: str, desk: AnswerDesk) -> None:
    model, payload, words = REFUSED[case]
    answer = desk.ask(model, reply(200, payload), stream=False)
    assert isinstance(answer, LLMResponse)
    assert (answer.finish_reason, answer.content) == (FinishReason.CONTENT_FILTER, words)


EMPTY: dict[str, tuple[str, dict[str, Any], FinishReason]] = {
    "chat": (CHAT, completion_body(None), FinishReason.STOP),
    "Claude": (CLAUDE, {"content": [], "stop_reason": "end_turn"}, FinishReason.STOP),
    "Gemini": (GEMINI, gemini("STOP"), FinishReason.STOP),
    "Gemini without parts": (GEMINI, gemini("STOP", content={"role": "model"}), FinishReason.STOP),
    "Gemini's thought": (
        GEMINI,
        gemini("STOP", content={"parts": [{"text": "Hm.", "thought": True}]}),
        FinishReason.STOP,
    ),
    "Gemini's other": (GEMINI, gemini("OTHER"), FinishReason.OTHER),
    "Gemini's limit": (GEMINI, gemini("MAX_TOKENS"), FinishReason.LENGTH),
    "Bedrock": (
        CONVERSE,
        {"output": {"message": {"content": []}}, "stopReason": "end_turn"},
        FinishReason.STOP,
    ),
    "a response": (RESPONSES, {"status": "completed", "output": []}, FinishReason.STOP),
    "a response's thought": (
        RESPONSES,
        {"status": "completed", "output": [{"type": "reasoning", "summary": []}]},
        FinishReason.STOP,
    ),
    "a response's limit": (
        RESPONSES,
        {
            "status": "incomplete",
            "incomplete_details": {"reason": "max_output_tokens"},
            "output": [],
        },
        FinishReason.LENGTH,
    ),
}


@pytest.mark.parametrize("case", EMPTY)
def test_an_empty_answer_comes_as_it_is_with_its_reason(case: str, desk: AnswerDesk) -> None:
    """What becomes of it is decided in one place for all models."""
    model, payload, reason = EMPTY[case]
    answer = desk.ask(model, reply(200, payload), stream=False)
    assert isinstance(answer, LLMResponse)
    assert (answer.content, answer.tool_calls, answer.finish_reason) == ("", None, reason)


def test_a_failure_in_frames_has_the_services_words(desk: AnswerDesk) -> None:
    body = frame("throttlingException", b'{"message": "Too many tokens, please wait"}', "exception")
    head = b"HTTP/1.1 200 OK\r\nContent-Type: " + FRAMES.encode() + b"\r\nConnection: close\r\n\r\n"
    failure = desk.ask(CONVERSE, raw(head + body), stream=True)
    assert isinstance(failure, ModelError)
    assert (failure.code, "please wait" in failure.message) == (C.RATE_LIMIT, True)


@pytest.mark.parametrize("end", [b"", b"data: [DONE]\n\n"])
def test_news_of_a_server_are_no_failure_unless_no_answer_comes(
    end: bytes, desk: AnswerDesk
) -> None:
    news = b'data: {"message": "the queue is long"}\n\n'
    sound = b'data: {"choices": [{"delta": {"content": "Hi"}, "finish_reason": "stop"}]}\n\n'
    answer = desk.ask(CHAT, lines(news + sound + end), stream=True)
    assert isinstance(answer, LLMResponse)
    assert answer.content == "Hi"
    for begun in (b"", BEGUN[CHAT]):
        failure = desk.ask(CHAT, lines(begun + news + end), stream=True)
        assert isinstance(failure, ModelError)
        assert "the queue is long" in failure.message


@pytest.mark.parametrize("label", ["text/html", "application/json", "text/plain"])
def test_words_in_place_of_an_answer_reach_the_user(label: str, desk: AnswerDesk) -> None:
    page = b"\n<html>the gateway has no upstream, key sk-proj-abc123DEF456</html>"
    failure = desk.ask(CHAT, reply(200, page, {"Content-Type": label}), stream=False)
    assert isinstance(failure, ModelError)
    assert (failure.code, failure.retryable) == (C.MALFORMED_ANSWER, True)
    assert "the gateway has no upstream" in failure.message
    assert "abc123" not in failure.message


BARE: dict[str, tuple[str, Script]] = {
    "Claude's deltas without a start": (CLAUDE, events(
        {"type": "message_start", "message": {}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hel"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "lo"}},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}}, {"type": "message_stop"})),
    "deltas of a response alone": (RESPONSES, events(
        {"type": "response.output_text.delta", "delta": "Hel"},
        {"type": "response.output_text.delta", "delta": "lo"},
        {"type": "response.completed", "response": {"status": "completed", "output": []}})),
    "one part of content": (CHAT, reply(200, completion_body() | {"choices": [
        {"message": {"content": {"type": "text", "text": "Hello"}}, "finish_reason": "stop"}]})),
    "one part of a delta": (CHAT, events({"choices": [{
        "delta": {"content": {"type": "text", "text": "Hello"}}, "finish_reason": "stop"}]})),
}  # fmt: skip


@pytest.mark.parametrize("case", BARE)
def test_an_answer_that_lacks_what_nobody_needs_is_read(case: str, desk: AnswerDesk) -> None:
    model, script = BARE[case]
    answer = desk.ask(model, script, stream=True)
    assert isinstance(answer, LLMResponse)
    assert (answer.content, answer.finish_reason) == ("Hello", FinishReason.STOP)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("invalid_prompt", C.INVALID_REQUEST),
        ("invalid_image_format", C.INVALID_REQUEST),
        ("invalid_base64_image", C.INVALID_REQUEST),
        ("image_too_large", C.INVALID_REQUEST),
        ("image_content_policy_violation", C.CONTENT_FILTER),
    ],
)
def test_a_response_that_failed_for_its_input_is_not_asked_again(
    code: str, expected: ModelErrorCode, desk: AnswerDesk
) -> None:
    stated = {"status": "failed", "output": [], "error": {"code": code, "message": "Words."}}
    failure = desk.ask(RESPONSES, reply(200, stated), stream=False)
    assert isinstance(failure, ModelError)
    assert (failure.code, failure.retryable) == (expected, False)
    assert "Words." in failure.message


ALIVE = b": keepalive\n\n" * 1000


@pytest.mark.parametrize(
    ("script", "tokens"),
    [
        (lines(ALIVE), 0),
        (lines(ALIVE + b'data: {"choices": [{"delta": {"content": "Hell"}}]}\n\n'), 1),
        (raw(b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n" + b"\n" * 4000), 0),
    ],
    ids=["comments", "comments and text", "blank lines"],
)
def test_signs_of_life_are_no_tokens_of_a_call_that_failed(
    script: Script, tokens: int, desk: AnswerDesk
) -> None:
    failure = desk.ask(CHAT, script, stream=True)
    assert isinstance(failure, ModelError)
    assert failure.received == tokens
