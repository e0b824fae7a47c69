"""One request as a rule sees it and as the log keeps it. Must not know the rules."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from stepfleet.worker.testing.openai.conversation import first_user_text, messages_of, text_of
from stepfleet.worker.testing.scenario import Usage


@dataclass(frozen=True)
class ToolAnswer:
    """One tool call of the conversation, and the text that it was answered with."""

    name: str
    arguments: Mapping[str, Any]
    content: str
    turn: int
    """The turn, from 1, in which the model requested it."""


@dataclass(frozen=True)
class RequestRecord:
    """A request: its body, its place in its conversation, its outcome.

    `key` identifies the conversation, `turn` the requested answer, and `attempt` how often it was
    requested; both count from 1. `received` and `answered` are seconds of the monotonic
    clock. `outcome` is None while the request is open, then `replied`, a kind of fault,
    `refused` (the conversation broke the protocol, or no rule had an answer) or `disconnected`.
    """

    number: int
    key: str
    turn: int
    attempt: int
    body: Mapping[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict)
    received: float = 0.0
    answered: float | None = None
    outcome: str | None = None
    status: int | None = None
    usage: Usage | None = None
    violation: str | None = None
    sent: Mapping[str, Any] = field(default_factory=dict)
    """The body as it was sent; `body` is that of chat completions for every protocol."""
    account: str = ""
    """The key that was sent, as a digest: rate limits are for each model and key."""
    limited: str | None = None
    """The kind of rate limit that had no room: `requests`, `tokens`, `in_flight` ..."""

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation as it was sent."""
        return messages_of(dict(self.body))

    @property
    def model(self) -> str:
        """The model that is requested."""
        return str(self.body.get("model"))

    @property
    def question(self) -> str:
        """The text of the first user message."""
        return first_user_text(dict(self.body))

    @property
    def streams(self) -> bool:
        """Whether the client wants a stream."""
        return bool(self.body.get("stream"))

    @property
    def tools(self) -> tuple[str, ...]:
        """The names of the declared tools."""
        declared = self.body.get("tools") or ()
        return tuple(str(tool["function"]["name"]) for tool in declared)

    @property
    def answers(self) -> tuple[ToolAnswer, ...]:
        """Every answered tool call of the conversation, in order."""
        return tuple(_answers(self.messages))


def _answers(messages: list[dict[str, Any]]) -> Iterator[ToolAnswer]:
    calls: dict[str, tuple[str, Mapping[str, Any]]] = {}
    turn = 0
    for message in messages:
        if message.get("role") == "assistant":
            turn += 1
            for call in message.get("tool_calls") or ():
                function = call["function"]
                calls[call["id"]] = (function["name"], _arguments(function["arguments"]))
        elif message.get("role") == "tool" and message.get("tool_call_id") in calls:
            name, arguments = calls[message["tool_call_id"]]
            yield ToolAnswer(name, arguments, text_of(message.get("content")), turn)


def _arguments(text: str) -> Mapping[str, Any]:
    try:
        arguments = json.loads(text)
    except ValueError:
        return {}
    return arguments if isinstance(arguments, dict) else {}
