"""Services of chat completions get no field that they refuse, or know by another name."""

from typing import Any

import orjson
import pytest

from stepfleet.orchestrator import Message, ModelRequest, Role, ToolCall, ToolSpec
from stepfleet.orchestrator.models.endpoint import endpoint_of
from stepfleet.orchestrator.models.services import SERVICES
from stepfleet.worker.models.openai.chat import CHAT_COMPLETIONS, chat_of

MISTRAL = {
    "model", "messages", "temperature", "top_p", "max_tokens", "stream", "stop", "random_seed",
    "metadata", "response_format", "tools", "tool_choice", "presence_penalty", "frequency_penalty",
    "n", "prediction", "parallel_tool_calls", "reasoning_effort", "prompt_mode", "safe_prompt",
    "prompt_cache_key", "service_tier", "guardrails",
}  # fmt: skip
"""What Mistral's API takes: it answers 422 to a request with any other field."""
MESSAGES = {
    "system": {"role", "content"},
    "user": {"role", "content"},
    "assistant": {"role", "content", "tool_calls", "prefix"},
    "tool": {"role", "content", "tool_call_id", "name"},
}
CALL = ToolCall(id="abcdef012", name="look", arguments={"a": 1})
TALK = (
    Message.system("Be brief."),
    Message(role=Role.DEVELOPER, content="In English."),
    Message(role=Role.USER, content="hi", name="Ann"),
    Message(role=Role.ASSISTANT, content="Looking.", name="Bob", tool_calls=(CALL,)),
    Message.tool(CALL, "seen"),
)
SETTINGS = {
    "temperature": 0.5, "top_p": 0.9, "max_tokens": 9, "stop": ["X"], "seed": 7, "stream": True,
    "reasoning_effort": "high",
}  # fmt: skip


def body_of(model: str, **settings: Any) -> dict[str, Any]:
    service, _, name = model.partition(":")
    request = ModelRequest.model_validate(
        {
            "model": name,
            "messages": TALK,
            "tools": (ToolSpec(name="look", description="Look."),),
            "parallel_tool_calls": False,
            "settings": {**SETTINGS, **settings},
        }
    )
    endpoint = endpoint_of(request.settings, {"MISTRAL_API_KEY": "k"}, SERVICES[service])
    made: dict[str, Any] = orjson.loads(
        chat_of(CHAT_COMPLETIONS, service, "").body(request, endpoint)
    )
    return made


@pytest.mark.parametrize(
    "made",
    [
        body_of("mistral:m"),
        body_of("mistral:m", base_url="http://127.0.0.1:9/v1"),
        body_of("openai:m", base_url="https://api.mistral.ai/v1"),
        body_of("compatible:m", base_url="https://api.mistral.ai/v1/"),
    ],
    ids=["by its name", "elsewhere", "as another's", "as a compatible one"],
)
def test_mistral_gets_no_field_that_it_refuses(made: dict[str, Any]) -> None:
    assert made.keys() <= MISTRAL
    assert (made["random_seed"], made["stream"]) == (7, True)
    for message in made["messages"]:
        assert message.keys() <= MESSAGES[message["role"]]


def test_an_extra_body_still_overrules_every_field() -> None:
    extra = {"seed": 8, "stream_options": {"include_usage": True}}
    made = body_of("mistral:m", extra_body=extra)
    assert (made["seed"], made["random_seed"]) == (8, 7)
    assert made["stream_options"] == {"include_usage": True}


def test_groq_gets_no_name_of_an_author() -> None:
    made = body_of("groq:m", base_url="http://127.0.0.1:9/v1")
    assert not any("name" in message for message in made["messages"])
    assert made["seed"] == 7
    assert made["stream_options"] == {"include_usage": True}


def test_other_services_get_what_they_got() -> None:
    made = body_of("vllm:m", base_url="http://localhost:4000/v1")
    assert [message.get("name") for message in made["messages"]] == [None, None, "Ann", "Bob", None]
    assert made["seed"] == 7
    assert made["stream_options"] == {"include_usage": True}
