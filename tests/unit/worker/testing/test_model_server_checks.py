from typing import Any

import httpx
import pytest

from stepfleet.worker.testing.openai.conversation import call_id, violation_in
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import Reply, ToolCallReply
from stepfleet.worker.testing.server import ModelServer

SYSTEM = {"role": "system", "content": "be brief"}
USER = {"role": "user", "content": "hi"}
LOOK = {"type": "function", "function": {"name": "look", "parameters": {}}}


def asks(*ids: str, name: str = "look") -> dict[str, Any]:
    function = {"name": name, "arguments": "{}"}
    calls = [{"id": one, "type": "function", "function": function} for one in ids]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def answers(tool_call_id: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": tool_call_id, "content": "seen"}


def sent(*messages: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": list(messages), "tools": [LOOK], **fields}


SOUND = [
    sent(USER),
    sent(SYSTEM, USER),
    sent(SYSTEM),
    sent(USER, {"role": "assistant", "content": "yes"}, USER),
    sent(USER, asks("a", "b"), answers("a"), answers("b")),
    sent(USER, asks("a"), answers("a"), asks("b"), answers("b"), USER),
    sent(USER, asks("a"), answers("a"), SYSTEM),
    sent(USER, tool_choice={"type": "function", "function": {"name": "look"}}),
    sent({"role": "user", "content": [{"type": "text", "text": "hi"}]}),
    sent(USER, asks(call_id("hi", 1, 0), name="unknown"), answers(call_id("hi", 1, 0))),
]

BROKEN = {
    "no model": (sent(USER, model=" "), "model"),
    "no messages": (sent(), "messages"),
    "unknown role": (sent({"role": "robot", "content": "x"}), "messages[0].role"),
    "no object": (sent("hi"), "messages[0].role"),
    "assistant first": (sent(SYSTEM, {"role": "assistant", "content": "x"}), "messages[1].role"),
    "tool first": (sent(answers("a")), "messages[0].role"),
    "answer to nothing": (sent(USER, answers("a")), "messages[1]"),
    "no answer": (sent(USER, asks("a")), "messages"),
    "one answer missing": (sent(USER, asks("a", "b"), answers("a")), "messages"),
    "answered twice": (sent(USER, asks("a"), answers("a"), answers("a")), "messages[3]"),
    "wrong order": (
        sent(USER, asks("a", "b"), answers("b"), answers("a")), "messages[2].tool_call_id"),
    "wrong id": (sent(USER, asks("a"), answers("x")), "messages[2].tool_call_id"),
    "user before the answer": (sent(USER, asks("a"), USER, answers("a")), "messages[2]"),
    "assistant before the answer": (
        sent(USER, asks("a"), asks("b"), answers("a"), answers("b")), "messages[2]"),
    "undeclared tool": (
        sent(USER, asks("a", name="other"), answers("a")),
        "messages[1].tool_calls[0].function.name"),
    "no tools declared": (
        {"model": "m", "messages": [USER, asks("a"), answers("a")]},
        "messages[1].tool_calls[0].function.name"),
    "blank id": (sent(USER, asks(" "), answers(" ")), "messages[1].tool_calls[0].id"),
    "one id twice": (
        sent(USER, asks("a", "a"), answers("a"), answers("a")), "messages[1].tool_calls[1].id"),
    "one id in two turns": (
        sent(USER, asks("a"), answers("a"), asks("a"), answers("a")),
        "messages[3].tool_calls[0].id"),
    "arguments no text": (
        sent(USER, {"role": "assistant", "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "look", "arguments": {}}}]},
            answers("a")),
        "messages[1].tool_calls[0].function.arguments"),
    "no type": (
        sent(USER, {"role": "assistant", "tool_calls": [
            {"id": "a", "function": {"name": "look", "arguments": "{}"}}]}, answers("a")),
        "messages[1].tool_calls[0].type"),
    "calls no list": (
        sent(USER, {"role": "assistant", "content": "x", "tool_calls": []}),
        "messages[1].tool_calls"),
    "silent assistant": (
        sent(USER, {"role": "assistant", "content": None}), "messages[1].content"),
    "empty answer": (
        sent(USER, asks("a"), {"role": "tool", "tool_call_id": "a", "content": None}),
        "messages[2].content"),
    "user without content": (sent({"role": "user"}), "messages[0].content"),
    "no tools in the list": (sent(USER, tools=[]), "tools"),
    "tool declared twice": (sent(USER, tools=[LOOK, LOOK]), "tools[1].function.name"),
    "tool with a bad name": (
        sent(USER, tools=[{"type": "function", "function": {"name": "a b"}}]),
        "tools[0].function.name"),
    "choice of no tool": (
        sent(USER, tool_choice={"type": "function", "function": {"name": "x"}}), "tool_choice"),
    "choice without tools": (
        {"model": "m", "messages": [USER], "tool_choice": "auto"}, "tool_choice"),
    "stream options alone": (
        sent(USER, stream_options={"include_usage": True}), "stream_options"),
}  # fmt: skip


@pytest.mark.parametrize("body", SOUND)
def test_a_sound_conversation_passes(body: dict[str, Any]) -> None:
    assert violation_in(body, "hi") is None


@pytest.mark.parametrize(("body", "field"), BROKEN.values(), ids=BROKEN)
def test_a_broken_conversation_is_refused_with_the_field(body: dict[str, Any], field: str) -> None:
    violation = violation_in(body, "hi")
    assert violation is not None
    assert violation.field == field


@pytest.mark.parametrize(
    "calls",
    [None, "no list", 7, {"id": "a"}, [None], [{"id": 1}], [{"id": "a", "function": None}]],
)
def test_calls_of_any_shape_are_judged_and_never_crash(calls: Any) -> None:
    message = {"role": "assistant", "content": "x", "tool_calls": calls}
    violation = violation_in(sent(USER, message), "hi")
    assert (violation is None) == (calls is None)


def post(server: ModelServer, body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/chat/completions", json=body, timeout=60)


def test_a_violation_is_answered_400_and_recorded() -> None:
    with ModelServer({"hi": ["never", "said"]}) as server:
        response = post(server, sent(USER, asks("a")))
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["param"] == "messages"
        assert "'a'" in error["message"]
        assert len(server.violations) == 1
        assert server.requests[0].outcome == "refused"


@pytest.mark.parametrize("body", [[], "text", None])
def test_a_body_that_is_no_object_is_a_violation(body: Any) -> None:
    with ModelServer() as server:
        assert post(server, body).status_code == 400
        assert server.violations == ("body: is not a JSON object",)


def test_the_end_of_a_script_is_a_violation() -> None:
    with ModelServer({"hi": ["only one"]}) as server:
        said = {"role": "assistant", "content": "only one"}
        assert post(server, sent(USER, said, USER)).status_code == 400
        assert "ends after turn 1" in server.violations[0]


def test_a_conversation_without_script_or_rules_is_a_violation() -> None:
    with ModelServer() as server:
        assert post(server, sent(USER)).status_code == 400
        assert "no script for the conversation 'hi'" in server.violations[0]


def test_rules_that_raise_are_a_violation_that_says_what_they_raised() -> None:
    def rules(request: RequestRecord) -> Reply:
        raise KeyError(request.question)

    with ModelServer(rules) as server:
        assert post(server, sent(USER)).status_code == 400
        assert server.violations == ("rules: KeyError: 'hi'",)


def test_a_call_of_an_unknown_tool_that_the_server_asked_for_may_be_shown_to_it() -> None:
    with ModelServer({"hi": [Reply(tool_calls=(ToolCallReply("unheard"),)), "done"]}) as server:
        message = post(server, sent(USER)).json()["choices"][0]["message"]
        answer = answers(message["tool_calls"][0]["id"])
        assert post(server, sent(USER, message, answer)).status_code == 200
