"""Reads and checks requests, as strictly as the strictest services do. Pure.

Decides what a sound conversation is; must not know what is answered.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from stepfleet.worker.testing.scenario import Tagged, name_of

_PART = Tagged(
    {
        "text": {"text": str},
        "image_url": {"image_url": {"url": str, "detail?": str}},
        "video_url": {"video_url": {"url": str}},
        "input_audio": {"input_audio": {"data": str, "format": str}},
        "file": {"file": {"filename?": str, "file_data?": str, "file_id?": str}},
        "refusal": {"refusal": str},
    }
)
SHAPE: dict[str, Any] = {
    "messages?": [{"content?": (str, [_PART]), "name?": str}],
    "stream?": bool,
    "stream_options?": {"include_usage?": bool},
    "parallel_tool_calls?": bool,
    "response_format?": Tagged({
        "text": {}, "json_object": {},
        "json_schema": {"json_schema": {"name": str, "schema?": dict, "strict?": bool}},
    }),
    "stop?": (str, [str]),
    **dict.fromkeys(("temperature?", "top_p?"), float),
    **dict.fromkeys(("max_tokens?", "max_completion_tokens?", "seed?", "n?"), int),
    **dict.fromkeys(("reasoning_effort?", "service_tier?", "user?"), str),
}  # fmt: skip
"""The types of what chat completions' own requests have; `violation_in` checks the rest."""
_ROLES = {"system", "developer", "user", "assistant", "tool"}
_OPENING = {"system", "developer"}
_TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_CHOICES = {"auto", "none", "required"}


@dataclass(frozen=True)
class Violation:
    """An error in a request, and its field."""

    field: str
    message: str

    def __str__(self) -> str:
        """Return both in one line."""
        return f"{self.field}: {self.message}"


def text_of(content: Any) -> str:
    """Return the text of a message's content: text, or the text parts of a list, joined."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))


def first_user_text(body: dict[str, Any]) -> str:
    """Return the text of the first user message: by default it identifies the conversation."""
    for message in messages_of(body):
        if message.get("role") == "user":
            return text_of(message.get("content"))
    return ""


def turn_of(body: dict[str, Any]) -> int:
    """Return which answer of the conversation is requested, counted from 1."""
    return 1 + sum(1 for message in messages_of(body) if message.get("role") == "assistant")


def messages_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the messages that are objects; a broken body has none."""
    messages = body.get("messages")
    return [one for one in messages if isinstance(one, dict)] if isinstance(messages, list) else []


def call_id(key: str, turn: int, index: int) -> str:
    """Return the id of a tool call, the same whenever this turn is requested again."""
    return f"call_{name_of(key, turn, index)}"


def violation_in(body: dict[str, Any], key: str) -> Violation | None:
    """Return the first thing that is wrong with a request, or None."""
    return next(_violations(body, key), None)


def _violations(body: dict[str, Any], key: str) -> Iterator[Violation]:
    if not isinstance(body.get("model"), str) or not body["model"].strip():
        yield Violation("model", "name a model")
    if body.get("stream_options") is not None and not body.get("stream"):
        yield Violation("stream_options", "only allowed when stream is true")
    names: set[str] = set()
    yield from _tools(body.get("tools"), names)
    yield from _tool_choice(body.get("tool_choice"), names)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        yield Violation("messages", "must be a list with at least one message")
        return
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or str(message.get("role")) not in _ROLES:
            yield Violation(f"messages[{i}].role", f"must be one of {', '.join(sorted(_ROLES))}")
            return
    yield from _order(messages)
    yield from _calls(messages, names, key)


def _tools(tools: Any, names: set[str]) -> Iterator[Violation]:
    """Check the declared tools and collect their names."""
    if tools is None:
        return
    if not isinstance(tools, list) or not tools:
        yield Violation("tools", "must be a list with at least one tool; leave it out for none")
        return
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type") != "function":
            yield Violation(f"tools[{i}]", "must be an object of type function")
            return
        name = function.get("name")
        if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
            yield Violation(f"tools[{i}].function.name", f"must match {_TOOL_NAME.pattern}")
            return
        if name in names:
            yield Violation(f"tools[{i}].function.name", f"{name!r} is declared twice")
        if not isinstance(function.get("parameters", {}), dict):
            yield Violation(f"tools[{i}].function.parameters", "must be a JSON Schema object")
        names.add(name)


def _tool_choice(choice: Any, names: set[str]) -> Iterator[Violation]:
    if choice is None:
        return
    if not names:
        yield Violation("tool_choice", "only allowed when tools are given")
    elif isinstance(choice, dict):
        function = choice.get("function")
        if not isinstance(function, dict) or function.get("name") not in names:
            yield Violation("tool_choice", "names no declared tool")
    elif str(choice) not in _CHOICES:
        yield Violation("tool_choice", f"must be one of {', '.join(sorted(_CHOICES))}, or a tool")


def _order(messages: list[dict[str, Any]]) -> Iterator[Violation]:
    for i, message in enumerate(messages):
        if message["role"] not in _OPENING:
            if message["role"] != "user":
                yield Violation(f"messages[{i}].role", "a user message comes first")
            return


def _calls(messages: list[dict[str, Any]], names: set[str], key: str) -> Iterator[Violation]:
    """Check that each call is answered once, in order, before any other message."""
    open_ids: list[str] = []
    used: set[str] = set()
    turn = 0
    for i, message in enumerate(messages):
        place = f"messages[{i}]"
        if message["role"] == "tool":
            yield from _answer(place, message, open_ids)
            open_ids = open_ids[1:]
            continue
        if open_ids:
            yield Violation(place, f"the tool call {open_ids[0]!r} has no answer before it")
        open_ids = []
        if message["role"] == "assistant":
            turn += 1
            yield from _assistant(place, message)
            calls = message.get("tool_calls") or []
            issued = [call_id(key, turn, index) for index in range(len(calls))]
            yield from _requested(place, calls, names, issued, used)
            open_ids = [call["id"] for call in calls]
        else:
            yield from _content(place, message.get("content"))
    if open_ids:
        yield Violation("messages", f"the tool call {open_ids[0]!r} has no answer")


def _answer(place: str, message: dict[str, Any], open_ids: list[str]) -> Iterator[Violation]:
    answered = message.get("tool_call_id")
    if not open_ids:
        yield Violation(place, f"answers {answered!r}, which is not an open tool call")
    elif answered != open_ids[0]:
        yield Violation(
            f"{place}.tool_call_id", f"is {answered!r}; the next open call is {open_ids[0]!r}"
        )
    yield from _content(place, message.get("content"))


def _assistant(place: str, message: dict[str, Any]) -> Iterator[Violation]:
    content, calls = message.get("content"), message.get("tool_calls")
    if calls is not None and (not isinstance(calls, list) or not calls):
        yield Violation(f"{place}.tool_calls", "must be a list with at least one call, or absent")
    if content is None and not calls and not message.get("refusal"):
        yield Violation(f"{place}.content", "must be given where there are no tool calls")
    if content is not None:
        yield from _content(place, content)


def _content(place: str, content: Any) -> Iterator[Violation]:
    if not isinstance(content, str | list):
        yield Violation(f"{place}.content", "must be text or a list of parts")


def _requested(
    place: str, calls: list[Any], names: set[str], issued: list[str], used: set[str]
) -> Iterator[Violation]:
    for index, call in enumerate(calls):
        where = f"{place}.tool_calls[{index}]"
        if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
            yield Violation(where, "must be an object with a function")
            return
        made, name = call.get("id"), call["function"].get("name")
        if not isinstance(made, str) or not made.strip():
            yield Violation(f"{where}.id", "must not be blank")
            return
        if made in used:
            yield Violation(f"{where}.id", f"{made!r} is used twice")
        used.add(made)
        if call.get("type") != "function":
            yield Violation(f"{where}.type", "must be function")
        if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
            yield Violation(f"{where}.function.name", f"must match {_TOOL_NAME.pattern}")
        elif name not in names and made != issued[index]:
            # A call of an unknown tool that this server itself made may be sent back to it.
            yield Violation(f"{where}.function.name", f"{name!r} is not a declared tool")
        if not isinstance(call["function"].get("arguments"), str):
            yield Violation(f"{where}.function.arguments", "must be text")
