"""Blocks that a conversation may hold, in the body of each protocol."""

from collections.abc import Callable
from functools import partial
from typing import Any

import orjson
import pytest

from stepfleet.orchestrator.memory.pruning import estimate_tokens
from stepfleet.orchestrator.models.endpoint import endpoint_of
from stepfleet.orchestrator.models.services import SERVICES, Api
from stepfleet.orchestrator.records.calls.tools import ToolCall
from stepfleet.orchestrator.records.conversation.messages import Message
from stepfleet.orchestrator.records.responses import ModelRequest, ModelSettings
from stepfleet.worker.models.anthropic import request_body as messages
from stepfleet.worker.models.bedrock.request import request_body as converse
from stepfleet.worker.models.bodies import encode
from stepfleet.worker.models.google import request_body as content
from stepfleet.worker.models.openai.chat import chat_of
from stepfleet.worker.models.openai.request import request_body as chat
from stepfleet.worker.models.providers import FORMATS
from stepfleet.worker.models.responses import request_body as responses

Body = Callable[[ModelRequest], dict[str, Any]]
BODIES = [partial(chat, official=True), responses, messages, content, converse]


def request(*blocks: dict[str, Any]) -> ModelRequest:
    message = Message.user(list(blocks))
    return ModelRequest(model="m", messages=(message,))


@pytest.mark.parametrize("body", BODIES)
def test_an_empty_text_beside_another_is_sent_or_left_out(body: Body) -> None:
    assert b"hello" in encode(body(request({"text": ""}, {"text": "hello"})))


@pytest.mark.parametrize("value", [2**70, "\ud800"])
@pytest.mark.parametrize("body", BODIES)
def test_json_that_orjson_cannot_write_is_sent_all_the_same(body: Body, value: Any) -> None:
    sent = encode(body(request({"json": {"value": value}})))
    assert str(value).encode("ascii", "backslashreplace") in sent


def test_a_conversation_without_turns_has_no_thinking_to_go_on_with() -> None:
    sent = ModelRequest(
        model="anthropic.claude-sonnet-4-5",
        messages=(Message.system("alone"),),
        settings=ModelSettings(reasoning_budget=2000),
    )
    assert converse(sent)["messages"] == []


MALFORMED: list[Any] = [
    "x", None, 7, [], {}, {"provider": True}, {"provider": True, "at": -9, "data": {}},
    {"provider": True, "at": 0, "data": "x"}, {"provider": True, "at": 10**9, "data": {}},
    {"provider": True, "at": 0, "data": {"message": {"role": "x"}, "calls": "x"}},
    {"provider": True, "at": 0, "data": {"message": "x", "calls": {"0": "x"}}},
    {"provider": True, "at": 0, "data": {"calls": {"0": {"id": 7, "function": 7}}}},
]  # fmt: skip


@pytest.mark.parametrize("block", MALFORMED)
@pytest.mark.parametrize("name", ["openai", "deepseek", "openai-responses", "anthropic", "google"])
def test_a_submitted_block_of_reasoning_that_is_none_breaks_no_call(name: str, block: Any) -> None:
    own = {"openai": "openai:m", "deepseek": "reasoning_content", "openai-responses": "openai"}
    if isinstance(block, dict) and block.get("provider"):
        block = {**block, "provider": own.get(name, name)}
    call = ToolCall(id="c1", name="look")
    answer = Message.assistant([{"reasoning": block}, {"text": "So."}], (call,))
    talk = (Message.user("hi"), answer, Message.tool(call, "seen"))
    settings = ModelSettings(base_url="http://127.0.0.1:9/v1")
    request = ModelRequest(model="m", messages=talk, settings=settings)
    service = SERVICES[name]
    form = FORMATS[service.api]
    if service.api is Api.CHAT:
        form = chat_of(form, name, service.reasoning)
    body = orjson.loads(form.body(request, endpoint_of(settings, {}, service)))
    assert "So." in str(body)
    assert str(body).count("seen") == 1
    assert estimate_tokens(answer) > 0
