from collections.abc import Iterator
from typing import Any

import httpx
import orjson
import pytest

from stepfleet.orchestrator import Message, ModelRequest, ModelSettings, ToolSpec
from stepfleet.worker.models import Models
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Reply, ToolCallReply, Usage
from stepfleet.worker.testing.server import ModelServer

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@pytest.fixture
def server() -> Iterator[ModelServer]:
    with ModelServer() as running:
        yield running


def body(question: str = "hi", *more: dict[str, Any], **fields: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": question}]
    return {"model": "gpt-4o-mini", "messages": [*messages, *more], "tools": [TOOL], **fields}


def post(server: ModelServer, sent: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.url}/chat/completions", json=sent, timeout=60)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    data = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert data[-1] == "[DONE]"
    return [orjson.loads(one) for one in data[:-1]]


def assembled(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    content, reason = "", None
    calls: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            content += choice["delta"].get("content") or ""
            reason = choice["finish_reason"] or reason
            for delta in choice["delta"].get("tool_calls", ()):
                call = calls.setdefault(delta["index"], {"arguments": ""})
                call |= {"id": delta.get("id", call.get("id"))}
                call |= {"name": delta["function"].get("name", call.get("name"))}
                call["arguments"] += delta["function"]["arguments"]
    return {"content": content, "calls": [calls[i] for i in sorted(calls)], "reason": reason}


def test_a_scripted_text_comes_as_a_completion_with_usage(server: ModelServer) -> None:
    """LLM-07"""
    server.script("hi", Reply("hello", usage=Usage(11, 7, cached_tokens=3)))
    completion = post(server, body()).json()
    assert completion["object"] == "chat.completion"
    assert completion["model"] == "gpt-4o-mini"
    (choice,) = completion["choices"]
    assert choice["message"] == {"role": "assistant", "content": "hello"}
    assert choice["finish_reason"] == "stop"
    assert completion["usage"]["total_tokens"] == 18
    assert completion["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}


@pytest.mark.parametrize(
    "reply",
    [
        Reply("a long text, cut into pieces: ü, €, 🐝" * 5, piece=3),
        Reply(tool_calls=(ToolCallReply("look", {"at": "the sea" * 9}), ToolCallReply("look"))),
        Reply("let me see", (ToolCallReply("look", {"a": 1}),), usage=Usage(5, 6)),
        Reply("cut", finish_reason="length"),
    ],
)
def test_a_stream_holds_what_the_whole_answer_holds(server: ModelServer, reply: Reply) -> None:
    server.script("hi", reply)
    whole = post(server, body()).json()
    response = post(server, body(stream=True, stream_options={"include_usage": True}))
    assert response.headers["content-type"] == "text/event-stream"
    chunks = events(response)
    message = whole["choices"][0]["message"]
    calls = [{"id": call["id"], **call["function"]} for call in message.get("tool_calls", ())]
    assert assembled(chunks) == {
        "content": message["content"] or "",
        "calls": calls,
        "reason": whole["choices"][0]["finish_reason"],
    }
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert {chunk["id"] for chunk in chunks} == {whole["id"]}


def test_a_stream_has_no_usage_unless_it_is_asked_for(server: ModelServer) -> None:
    server.script("hi", "hello")
    assert {"usage" in chunk for chunk in events(post(server, body(stream=True)))} == {False}


def test_the_turn_of_the_conversation_picks_the_reply(server: ModelServer) -> None:
    server.script("hi", Reply(tool_calls=(ToolCallReply("look"),)), "done")
    for _ in range(2):  # whichever was asked before
        message = post(server, body()).json()["choices"][0]["message"]
        answer = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "x"}
        second = post(server, body("hi", message, answer)).json()
        assert second["choices"][0]["message"]["content"] == "done"


def test_a_repeated_request_gets_the_same_bytes(server: ModelServer) -> None:
    server.script("hi", Reply(tool_calls=(ToolCallReply("look"), ToolCallReply("look"))))
    first, second = (post(server, body()).content for _ in range(2))
    assert first == second
    ids = [one["id"] for one in orjson.loads(first)["choices"][0]["message"]["tool_calls"]]
    assert len(set(ids)) == 2


def test_conversations_do_not_disturb_each_other(server: ModelServer) -> None:
    server.follow({"one": ["first"], "other": ["second"]})
    for question, said in (("other", "second"), ("one", "first")):
        choice = post(server, body(question)).json()["choices"][0]
        assert choice["message"]["content"] == said


def test_rules_see_the_tools_and_what_they_answered(server: ModelServer) -> None:
    def rules(request: RequestRecord) -> Reply:
        if not request.answers:
            return Reply(tool_calls=(ToolCallReply(request.tools[0], {"at": request.question}),))
        (answer,) = request.answers
        said = f"{answer.name} {answer.arguments['at']} {answer.content} {answer.turn}"
        return Reply(said)

    server.follow(rules)
    message = post(server, body("the sea")).json()["choices"][0]["message"]
    call = message["tool_calls"][0]["id"]
    answer = {"role": "tool", "tool_call_id": call, "content": [{"type": "text", "text": "blue"}]}
    final = post(server, body("the sea", message, answer)).json()["choices"][0]["message"]
    assert final["content"] == "look the sea blue 1"


def test_odd_calls_are_sent_as_they_are_scripted(server: ModelServer) -> None:
    odd = (
        ToolCallReply("look", "{not json"),
        ToolCallReply("look", id=""),
        ToolCallReply("look", omit_id=True),
        ToolCallReply("", id="mine"),
    )
    server.script("hi", Reply(tool_calls=odd, send_usage=False, extra={"refusal": "no"}))
    completion = post(server, body()).json()
    message = completion["choices"][0]["message"]
    calls = message["tool_calls"]
    assert calls[0]["function"]["arguments"] == "{not json"
    assert calls[1]["id"] == ""
    assert "id" not in calls[2]
    assert (calls[3]["id"], calls[3]["function"]["name"]) == ("mine", "")
    assert message["content"] is None
    assert message["refusal"] == "no"
    assert "usage" not in completion


def test_the_models_are_listed(server: ModelServer) -> None:
    listed = httpx.get(f"{server.url}/models").json()
    assert "gpt-4o-mini" in [one["id"] for one in listed["data"]]
    assert httpx.get(f"{server.url}/models/any").json()["id"] == "any"
    assert httpx.get(f"{server.url}/nothing").status_code == 404


def test_the_free_port_is_below_the_ephemeral_ones(server: ModelServer) -> None:
    assert 1024 < int(server.url.split(":")[2].split("/")[0]) < 32768


def test_a_taken_port_is_an_error_that_names_it(server: ModelServer) -> None:
    port = int(server.url.split(":")[2].split("/")[0])
    with pytest.raises(OSError, match=f"port {port}"), ModelServer(port=port):
        pass


def test_a_large_request_is_read(server: ModelServer) -> None:
    question = "x" * 3_000_000
    server.script(question, "read")
    assert post(server, body(question)).json()["choices"][0]["message"]["content"] == "read"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_fleets_own_client_understands_it(server: ModelServer, stream: bool) -> None:
    """LLM-07"""
    server.script("hi", Reply("look!", (ToolCallReply("look", {"at": [1, 2]}),)))
    models = Models(environment={"OPENAI_API_KEY": "k", "OPENAI_BASE_URL": server.url})
    request = ModelRequest(
        model="openai:gpt-4o-mini",
        messages=(Message.user("hi"),),
        tools=(ToolSpec(name="look", description="look", parameters={}),),
        settings=ModelSettings(base_url=server.url, stream=stream),
    )
    try:
        response = await models.generate(request)
    finally:
        await models.aclose()
    assert response.content == "look!"
    assert response.tool_calls is not None
    assert response.tool_calls[0].arguments == {"at": [1, 2]}
    assert response.usage is not None
    assert server.violations == ()
