"""Blocks that a conversation may hold, in the body of each protocol."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from stepfleet.orchestrator.records.conversation.messages import Message
from stepfleet.orchestrator.records.responses import ModelRequest, ModelSettings
from stepfleet.worker.models.anthropic.request import request_body as messages
from stepfleet.worker.models.bedrock.request import request_body as converse
from stepfleet.worker.models.bodies import encode
from stepfleet.worker.models.google.request import request_body as content
from stepfleet.worker.models.openai.request import request_body as chat
from stepfleet.worker.models.responses.request import request_body as responses

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
