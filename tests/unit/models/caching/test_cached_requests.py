"""Which requests are the same to the response cache."""

import hashlib
import json
from typing import Any

import pytest

from stepfleet.orchestrator import Message, ModelRequest, ModelSettings, Role, ToolCall, ToolSpec
from stepfleet.orchestrator.models.caching import canonical, key_of
from stepfleet.orchestrator.records.responses import OutputFormat

WHERE = "https://models.example/v1/chat/completions"
CALL = ToolCall(id="c1", name="look", arguments={"what": "sun", "far": {"a": 1, "b": 2}})
LOOK = ToolSpec(
    name="look",
    description="Look.",
    parameters={"type": "object", "properties": {"what": {"type": "string"}}},
)
REQUEST = ModelRequest(
    model="openai:m",
    messages=(
        Message.system("Be brief."),
        Message.user("What is there?"),
        Message.assistant("", (CALL,)),
        Message.tool(CALL, "light"),
    ),
    tools=(LOOK,),
    settings=ModelSettings(base_url="https://models.example/v1", temperature=0),
)


def changed(**fields: Any) -> ModelRequest:
    return REQUEST.model_copy(update=fields)


def with_settings(**fields: Any) -> ModelRequest:
    return changed(settings=REQUEST.settings.model_copy(update=fields))


def with_message(number: int, message: Message) -> ModelRequest:
    messages = list(REQUEST.messages)
    messages[number] = message
    return changed(messages=tuple(messages))


OTHERS = {
    "model": changed(model="openai:n"),
    "system prompt": with_message(0, Message.system("Be brief!")),
    "user message": with_message(1, Message.user("What was there?")),
    "who speaks": with_message(1, Message(role=Role.DEVELOPER, content="What is there?")),
    "media": with_message(1, Message.user([{"text": "What is there?"}])),
    "a call's arguments": with_message(
        2, Message.assistant("", (CALL.model_copy(update={"arguments": {"what": "moon"}}),))
    ),
    "a tool's result": with_message(3, Message.tool(CALL, "dark")),
    "order of messages": changed(messages=tuple(reversed(REQUEST.messages))),
    "fewer messages": changed(messages=REQUEST.messages[:2]),
    "no tools": changed(tools=()),
    "a tool's description": changed(tools=(LOOK.model_copy(update={"description": "See."}),)),
    "a tool's parameters": changed(tools=(LOOK.model_copy(update={"parameters": {}}),)),
    "tool choice": changed(tool_choice="look"),
    "parallel tool calls": changed(parallel_tool_calls=False),
    "JSON": changed(output=OutputFormat()),
    "a tool's name": changed(tools=(LOOK.model_copy(update={"name": "see"}),)),
    "output schema": changed(output=OutputFormat(json_schema={"type": "object"})),
    "temperature": with_settings(temperature=0.5),
    "no temperature": with_settings(temperature=None),
    "top_p": with_settings(top_p=0.9),
    "max_tokens": with_settings(max_tokens=10),
    "stop": with_settings(stop=("END",)),
    "seed": with_settings(seed=7),
    "extra_body": with_settings(extra_body={"top_k": 3}),
}


@pytest.mark.parametrize("what", OTHERS)
def test_whatever_the_model_is_asked_otherwise_makes_another_key(what: str) -> None:
    """CACHE-03"""
    assert key_of(OTHERS[what], WHERE) != key_of(REQUEST, WHERE)


def test_all_other_requests_differ_from_each_other_and_by_who_is_asked() -> None:
    """CACHE-03"""
    keys = {key_of(one, WHERE) for one in OTHERS.values()}
    assert len(keys) == len(OTHERS)
    assert key_of(REQUEST, "https://elsewhere.example/v1") != key_of(REQUEST, WHERE)


def test_the_order_of_names_in_objects_is_no_difference() -> None:
    """CACHE-03"""
    arguments = {"far": {"b": 2, "a": 1}, "what": "sun"}
    call = CALL.model_copy(update={"arguments": arguments})
    again = with_message(2, Message.assistant("", (call,)))
    assert list(arguments) != list(CALL.arguments)
    assert key_of(again, WHERE) == key_of(REQUEST, WHERE)
    one = with_settings(extra_body={"a": {"x": 1, "y": [1, {"p": 1, "q": 2}]}, "b": 2})
    other = with_settings(extra_body={"b": 2, "a": {"y": [1, {"q": 2, "p": 1}], "x": 1}})
    assert key_of(one, WHERE) == key_of(other, WHERE)


@pytest.mark.parametrize(
    "same",
    [
        with_settings(timeout=3.0),
        with_settings(stream=True),
        with_settings(temperature=0.0),
        with_message(1, Message.user("What is there?").model_copy(update={"metadata": {"n": 1}})),
    ],
)
def test_what_the_model_is_not_sent_is_no_difference(same: ModelRequest) -> None:
    """CACHE-03"""
    assert key_of(same, WHERE) == key_of(REQUEST, WHERE)


def test_nothing_that_opens_the_door_is_in_the_form() -> None:
    """CACHE-03"""
    told = canonical(with_settings(api_key_env="MY_SECRET_KEY", organization="org-7"), WHERE)
    assert "MY_SECRET_KEY" not in told
    assert "org-7" not in told
    assert told == canonical(REQUEST, WHERE)


def test_the_key_is_the_hash_of_the_form_and_stays_what_it_is() -> None:
    """CACHE-03: another key for the same request would make all entries of a fleet useless."""
    form = canonical(REQUEST, WHERE)
    assert json.loads(form)["provider"] == WHERE
    assert key_of(REQUEST, WHERE) == hashlib.sha256(form.encode()).hexdigest()
    plain = ModelRequest(model="openai:m", messages=(Message.user("hi"),))
    expected = "a5b2f38cfad4a9ece165ae27530b986d02f7a878a390e734536bd944a2890d02"
    assert key_of(plain, WHERE) == expected


def test_what_json_holds_only_just_has_a_key_all_the_same() -> None:
    odd = with_message(1, Message.user("\ud800 and "))
    big = with_settings(extra_body={"n": 2**90, "x": float("inf")})
    assert len({key_of(odd, WHERE), key_of(big, WHERE), key_of(REQUEST, WHERE)}) == 3
