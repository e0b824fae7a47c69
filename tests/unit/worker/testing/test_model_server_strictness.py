"""Requests that a service refuses: of wrong types, in a wrong order, without their reasoning."""

import copy
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import orjson
import pytest

from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Reply, ToolCallReply
from stepfleet.worker.testing.server import ModelServer

SCHEMA = {"type": "object", "properties": {}}
Body = dict[str, Any]


def rules(request: RequestRecord) -> Reply:
    if request.turn > 1:
        return Reply("Seen.")
    calls = (ToolCallReply("look", {"page": 1}), ToolCallReply("look", {"page": 2}))
    return Reply("Let me see.", calls, reasoning="Hm.")


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with (
        ModelServer(rules) as server,
        httpx.Client(base_url=server.url.removesuffix("/v1"), timeout=60) as client,
    ):
        yield client


def chat(post: Callable[[Body], Body]) -> Body:
    body: Body = {
        "model": "m", "temperature": 0.5, "tool_choice": "auto", "stop": ["X"],
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [
                {"type": "text", "text": "hi"},
                {"type": "image_url", "image_url": {"url": "https://x/y.png"}}]},
        ],
        "tools": [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}],
    }  # fmt: skip
    message = post(body)["choices"][0]["message"]
    results = [
        {"role": "tool", "tool_call_id": one["id"], "content": "x"} for one in message["tool_calls"]
    ]
    return {**body, "messages": [*body["messages"], message, *results]}


def responses(post: Callable[[Body], Body]) -> Body:
    body: Body = {
        "model": "m", "store": False, "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "low"}, "tool_choice": {"type": "function", "name": "look"},
        "input": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [
                {"type": "input_text", "text": "hi"},
                {"type": "input_image", "image_url": "https://x/y.png"}]},
        ],
        "tools": [{"type": "function", "name": "look", "parameters": SCHEMA, "strict": False}],
    }  # fmt: skip
    items = post(body)["output"]
    for item in items:
        item.pop("status", None)
    outputs = [
        {"type": "function_call_output", "call_id": one["call_id"], "output": "x"}
        for one in items
        if one["type"] == "function_call"
    ]
    return {**body, "input": [*body["input"], *items, *outputs]}


def messages(post: Callable[[Body], Body]) -> Body:
    body: Body = {
        "model": "m", "max_tokens": 4000, "thinking": {"type": "enabled", "budget_tokens": 2000},
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "tools": [{"name": "look", "input_schema": SCHEMA}], "tool_choice": {"type": "auto"},
        "messages": [
            {"role": "user", "content": [
                {"type": "text", "text": "hi"},
                {"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}]},
        ],
    }  # fmt: skip
    content = post(body)["content"]
    results = [
        {
            "type": "tool_result",
            "tool_use_id": one["id"],
            "content": [{"type": "text", "text": "x"}],
        }
        for one in content
        if one["type"] == "tool_use"
    ]
    answer = {"role": "assistant", "content": content}
    return {**body, "messages": [*body["messages"], answer, {"role": "user", "content": results}]}


def content(post: Callable[[Body], Body]) -> Body:
    body: Body = {
        "systemInstruction": {"parts": [{"text": "Be brief."}]},
        "generationConfig": {"temperature": 0.5, "thinkingConfig": {"thinkingBudget": 100}},
        "toolConfig": {"functionCallingConfig": {"mode": "AUTO"}},
        "tools": [{"functionDeclarations": [{"name": "look", "parametersJsonSchema": SCHEMA}]}],
        "contents": [
            {"role": "user", "parts": [
                {"text": "hi"}, {"inlineData": {"mimeType": "image/png", "data": "AA=="}}]},
        ],
    }  # fmt: skip
    answer = post(body)["candidates"][0]["content"]
    answer["parts"] = [part for part in answer["parts"] if not part.get("thought")]
    results = [
        {"functionResponse": {"id": one["functionCall"]["id"], "name": "look",
                              "response": {"result": "x"}}}
        for one in answer["parts"] if "functionCall" in one
    ]  # fmt: skip
    return {**body, "contents": [*body["contents"], answer, {"role": "user", "parts": results}]}


def converse(post: Callable[[Body], Body]) -> Body:
    tool = {"toolSpec": {"name": "look", "inputSchema": {"json": SCHEMA}}}
    body: Body = {
        "system": [{"text": "Be brief."}, {"cachePoint": {"type": "default"}}],
        "inferenceConfig": {"temperature": 0.5, "maxTokens": 100},
        "toolConfig": {"tools": [tool], "toolChoice": {"any": {}}},
        "messages": [
            {"role": "user", "content": [
                {"text": "hi"}, {"image": {"format": "png", "source": {"bytes": "AA=="}}}]},
        ],
    }  # fmt: skip
    answer = post(body)["output"]["message"]
    results = [
        {"toolResult": {"toolUseId": one["toolUse"]["toolUseId"], "content": [{"text": "x"}]}}
        for one in answer["content"]
        if "toolUse" in one
    ]
    return {**body, "messages": [*body["messages"], answer, {"role": "user", "content": results}]}


PATHS: dict[str, tuple[str, Callable[[Callable[[Body], Body]], Body]]] = {
    "chat": ("/v1/chat/completions", chat),
    "responses": ("/v1/responses", responses),
    "messages": ("/v1/messages", messages),
    "content": ("/v1/models/m:generateContent", content),
    "converse": ("/model/m/converse", converse),
}


def conversation(client: httpx.Client, name: str) -> Body:
    path, made = PATHS[name]
    return made(lambda body: dict(client.post(path, json=body).json()))


def refusal(client: httpx.Client, name: str, body: Any) -> str:
    """Return the message of the 400, in the provider's own form."""
    response = client.post(PATHS[name][0], content=orjson.dumps(body))
    assert response.status_code == 400, response.text
    error = response.json().get("error", response.json())
    if name == "converse":
        assert response.headers["x-amzn-errortype"].startswith("ValidationException:")
    elif name == "messages":
        assert (response.json()["type"], error["type"]) == ("error", "invalid_request_error")
    elif name == "content":
        assert (error["code"], error["status"]) == (400, "INVALID_ARGUMENT")
    else:
        assert error["type"] == "invalid_request_error"
    return str(error.get("param", "")) + ": " + str(error["message"])


@pytest.mark.parametrize("name", PATHS)
def test_a_whole_conversation_is_answered(client: httpx.Client, name: str) -> None:
    response = client.post(PATHS[name][0], json=conversation(client, name))
    assert response.status_code == 200, response.text
    assert "Seen." in response.text


VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 2.5, "", "x", "ü\x00", [], {}, [[]], [None], {"type": "text"}, {"type": []},
    "9" * 2000, 10**18, ["x"], [{"role": "user"}],
)  # fmt: skip


def mutated(value: Any, draw: random.Random) -> Any:
    """Return the body with one place changed: replaced, dropped, doubled or swapped."""
    body = copy.deepcopy(value)
    places = list(_places(body))
    inside, name = draw.choice(places)
    match draw.randrange(5):
        case 0:
            del inside[name]
        case 1 if isinstance(inside, list):
            inside.insert(name, copy.deepcopy(inside[name]))
        case 2 if isinstance(inside, list):
            inside.reverse()
        case 3:
            other, key = draw.choice(places)
            inside[name] = copy.deepcopy(other[key])
        case _:
            inside[name] = draw.choice(VALUES)
    return body


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    names = value.keys() if isinstance(value, dict) else range(len(value))
    for name in names:
        yield value, name
        if isinstance(value[name], dict | list):
            yield from _places(value[name])


@pytest.mark.timeout(600)  # thousands of requests are processor time
@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("count", [250, pytest.param(4_000, marks=pytest.mark.long)])
def test_a_mutated_request_is_answered_or_refused_and_never_breaks_the_server(
    client: httpx.Client, name: str, count: int
) -> None:
    sound, draw = conversation(client, name), random.Random(count)
    seen = set()
    for _ in range(count):
        body = sound
        for _ in range(draw.choice((1, 1, 2, 3))):
            body = mutated(body, draw)
        response = client.post(PATHS[name][0], content=orjson.dumps(body))
        seen.add(response.status_code)
        assert response.status_code in (200, 400), orjson.dumps(body)
        if response.status_code == 400:
            assert response.json().get("error", response.json())["message"]
    assert seen == {200, 400}


@pytest.mark.parametrize("name", PATHS)
def test_a_deep_or_long_body_is_refused(client: httpx.Client, name: str) -> None:
    path = PATHS[name][0]
    for deep in (b'{"model":' + b"[" * 900 + b"]" * 900 + b"}", b"[" * 5000, b'{"model":"\xff"}'):
        assert client.post(path, content=deep).status_code == 400
    long = b'{"model":"' + b"x" * (32 << 20) + b'"}'
    assert "longer than" in client.post(path, content=long).text


FIELDS = {
    "chat": "messages",
    "responses": "input",
    "messages": "messages",
    "content": "contents",
    "converse": "messages",
}


@pytest.mark.parametrize("name", PATHS)
def test_a_call_without_its_result_is_refused(client: httpx.Client, name: str) -> None:
    body = conversation(client, name)
    del body[FIELDS[name]][-1]
    words = {
        "chat": "has no answer", "responses": "No tool output found for function call call_",
        "messages": "without `tool_result` blocks immediately after: call_",
        "content": "number of function response parts is equal",
        "converse": "Expected toolResult blocks for the Ids: call_",
    }  # fmt: skip
    assert words[name] in refusal(client, name, body)


@pytest.mark.parametrize("name", PATHS)
def test_a_result_without_its_call_is_refused(client: httpx.Client, name: str) -> None:
    body = conversation(client, name)
    turns = body[FIELDS[name]]
    first = next(i for i, turn in enumerate(turns) if turn.get("role") == "user")
    results = [turn for turn in turns if "tool" in str(turn.get("role"))
               or "_output" in str(turn.get("type"))] or turns[-1:]  # fmt: skip
    body[FIELDS[name]] = [*turns[: first + 1], *results]
    words = {
        "chat": "is not an open tool call",
        "responses": "No tool call found for function call output",
        "messages": "unexpected `tool_use_id` found in `tool_result` blocks",
        "content": "number of function response parts is equal",
        "converse": "roles must alternate",
    }  # fmt: skip
    assert words[name] in refusal(client, name, body)


def with_ids(body: Body, change: Callable[[list[str]], list[str]]) -> Body:
    """Return the body with other ids of its calls."""
    text = orjson.dumps(body).decode()
    ids = list(dict.fromkeys(re.findall(r'"(call_[0-9a-f]+)"', text)))
    for old, new in zip(ids, change(ids), strict=True):
        text = text.replace(f'"{old}"', f'"{new}"')
    changed: Body = orjson.loads(text)
    return changed


@pytest.mark.parametrize("name", PATHS)
def test_an_id_that_two_calls_have_is_refused(client: httpx.Client, name: str) -> None:
    body = with_ids(conversation(client, name), lambda ids: ids[:1] * len(ids))
    if name == "responses":  # whose items of calls have ids of their own too
        body["input"] = [{key: one[key] for key in one if key != "id"} for one in body["input"]]
        body["input"] = [one for one in body["input"] if one.get("type") != "reasoning"]
    assert "is used twice" in refusal(client, name, body)


@pytest.mark.parametrize(
    ("name", "odd"), [("messages", "call.1"), ("converse", "call 1"), ("responses", "x" * 65)]
)
def test_an_id_that_the_service_does_not_take_is_refused(
    client: httpx.Client, name: str, odd: str
) -> None:
    body = with_ids(conversation(client, name), lambda ids: [odd, *ids[1:]])
    assert "should match pattern" in refusal(client, name, body)


def test_thinking_comes_back_unchanged_and_first(client: httpx.Client) -> None:
    body = conversation(client, "messages")
    blocks = body["messages"][1]["content"]
    thinking, text, *calls = blocks
    for changed, words in (
        ([text, *calls], "must start with a thinking block"),
        ([{**thinking, "thinking": "Hm!"}, text, *calls], "Invalid `signature`"),
        ([{**thinking, "signature": "x"}, text, *calls], "Invalid `signature`"),
        ([*calls, thinking, text], "must start with a thinking block"),
        ([thinking, *calls, thinking], "cannot be modified"),
    ):
        body["messages"][1]["content"] = changed
        assert words in refusal(client, "messages", body)
    body["messages"][1]["content"] = [text, *calls]
    body["thinking"] = {"type": "disabled"}
    assert client.post("/v1/messages", json=body).status_code == 200
    body["messages"][1:] = [{"role": "assistant", "content": [thinking]}, body["messages"][0]]
    assert "final block" in refusal(client, "messages", body)


def test_reasoning_of_converse_comes_back_unchanged_and_first(client: httpx.Client) -> None:
    body = conversation(client, "converse")
    body["additionalModelRequestFields"] = {"thinking": {"type": "enabled", "budget_tokens": 2000}}
    assert client.post("/model/m/converse", json=body).status_code == 200
    thinking, text, *calls = body["messages"][1]["content"]
    other = {"reasoningContent": {"reasoningText": {"text": "Hm.", "signature": "x"}}}
    for changed, words in (
        ([text, *calls], "must start with a thinking block"),
        ([other, text, *calls], "Invalid `signature`"),
        ([thinking, *calls, thinking], "cannot be modified"),
    ):
        body["messages"][1]["content"] = changed
        assert words in refusal(client, "converse", body)
    body["messages"][1]["content"] = [text, *calls]
    del body["additionalModelRequestFields"]
    assert client.post("/model/m/converse", json=body).status_code == 200


def test_an_item_of_reasoning_and_what_follows_it_come_back_together(client: httpx.Client) -> None:
    body = conversation(client, "responses")
    system, user, reasoning, *rest = body["input"]
    assert reasoning["type"] == "reasoning"
    for changed, words in (
        ([system, user, *rest], "was provided without its required 'reasoning' item: 'rs_"),
        ([system, reasoning, user, *rest], "without its required following item"),
        ([system, user, *rest, reasoning], "without its required"),
        ([system, user, {**reasoning, "encrypted_content": "x"}, *rest], "could not be verified"),
    ):
        assert words in refusal(client, "responses", {**body, "input": changed})
    for item in rest:
        item.pop("id", None)
    body["input"] = [system, user, *rest]  # items without ids are known by nothing
    assert client.post("/v1/responses", json=body).status_code == 200


def test_the_first_call_comes_back_with_its_signature(client: httpx.Client) -> None:
    body = conversation(client, "content")
    parts = body["contents"][1]["parts"]
    first, second = [part for part in parts if "functionCall" in part]
    mark = first.pop("thoughtSignature")
    assert "missing a thought_signature" in refusal(client, "content", body)
    second["thoughtSignature"] = mark
    assert "missing a thought_signature" in refusal(client, "content", body)
    first["thoughtSignature"] = "eA=="
    assert "Thought signature is not valid" in refusal(client, "content", body)


def test_at_most_four_blocks_are_marked_for_the_cache(client: httpx.Client) -> None:
    body = conversation(client, "messages")
    mark = {"cache_control": {"type": "ephemeral"}}
    body["system"] = [{"type": "text", "text": str(i), **mark} for i in range(4)]
    assert client.post("/v1/messages", json=body).status_code == 200
    assert "Found 5" in refusal(client, "messages", {**body, **mark})
