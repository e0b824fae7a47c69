"""JSON mode: answers are JSON objects whose actions become tool calls, and the way back.

A call in a model's object is executed as any other. On the wire there are no native calls: the
conversation is sent as text, so that any model can read it. Pure.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from stepfleet.orchestrator.records.calls.tools import ToolCall, ToolSpec
from stepfleet.orchestrator.records.conversation.messages import Content, Message
from stepfleet.orchestrator.records.responses import LLMResponse, ModelRequest, OutputFormat
from stepfleet.orchestrator.records.steps import FinishReason
from stepfleet.orchestrator.tools.calls import parse_tool_call
from stepfleet.orchestrator.tools.schemas.bounded_json import BoundsError, load_bounded

MOST_CALLS = 32
"""Actions of one answer that are read."""

_NAMES = ("tool", "name", "tool_name", "action")
_ARGUMENTS = ("arguments", "input", "args", "parameters", "action_input")


def parsed_object(text: str) -> dict[str, Any]:
    """Return the JSON object that `text` is, or the only one in prose or a code fence.

    Raises `BoundsError` that names the problem.
    """
    stripped = text.strip()
    begin, end = stripped.find("{"), stripped.rfind("}")
    if begin < 0:
        raise BoundsError("the answer holds no JSON object")
    value = load_bounded(stripped[begin : end + 1] if end > begin else stripped[begin:])
    if not isinstance(value, dict):
        raise BoundsError("the answer is not a JSON object")
    return value


def calls_of(parsed: Mapping[str, Any], step: int) -> tuple[ToolCall, ...]:
    """Return the calls of an answer's `action` (or list of `actions`).

    Their ids are the same whenever `step` (from 1, of the session) is read again. A malformed
    action is a call with its `error`.
    """
    actions = parsed.get("action") or parsed.get("actions")
    if not actions:
        return ()
    if isinstance(actions, str):
        actions = {"name": actions, "arguments": _first(parsed, _ARGUMENTS)}
    listed = actions if isinstance(actions, list) else [actions]
    return tuple(
        _call(one, f"action_{step}_{index}") for index, one in enumerate(listed[:MOST_CALLS])
    )


def with_calls(response: LLMResponse, step: int) -> LLMResponse:
    """Return the answer with the calls of its text; an unreadable or refused one as it is."""
    if response.tool_calls or response.finish_reason is FinishReason.CONTENT_FILTER:
        return response
    try:
        calls = calls_of(parsed_object(response.content), step)
    except BoundsError:
        return response
    if not calls:
        return response
    return response.model_copy(
        update={"tool_calls": calls, "finish_reason": FinishReason.TOOL_CALLS}
    )


def in_json_mode(request: ModelRequest, messages: tuple[Message, ...]) -> ModelRequest:
    """Return the request in JSON mode with `messages` as text, and no native tools."""
    return request.model_copy(
        update={
            "messages": tuple(as_text(messages)),
            "tools": (),
            "tool_choice": "auto",
            "parallel_tool_calls": None,
            "output": request.output or OutputFormat(),
        }
    )


def tools_paragraph(tools: Iterable[ToolSpec]) -> str:
    """Return the tools on offer with the JSON Schema of their arguments, a line each."""
    lines = [
        f"- {tool.name}: {' '.join(tool.description.split())} Arguments (JSON Schema): "
        f"{json.dumps(tool.parameters, ensure_ascii=False, separators=(',', ':'))}"
        for tool in tools
    ]
    return "\n".join(["The tools that an action can name:", *lines]) if lines else ""


def as_text(messages: Iterable[Message]) -> Iterator[Message]:
    """Yield a conversation without calls: the results of a turn become one user message."""
    results: list[Message] = []
    for message in messages:
        if message.is_tool():
            results.append(message)
            continue
        if results:
            yield _observations(results)
            results = []
        yield _call_as_text(message) if message.tool_calls else message
    if results:
        yield _observations(results)


def _call_as_text(message: Message) -> Message:
    content = message.content
    if not content or (message.reasoning and not message.text):
        actions = [{"tool": call.name, "arguments": call.arguments} for call in message.tool_calls]
        content = json.dumps({"action": actions[0] if len(actions) == 1 else actions})
    return message.model_copy(update={"content": content, "tool_calls": ()})


def _observations(results: list[Message]) -> Message:
    if all(isinstance(one.content, str) for one in results):
        text = "\n\n".join(f"Observation ({one.name}): {one.content}" for one in results)
        return Message.user(text)
    blocks: list[dict[str, Any]] = []
    for one in results:
        blocks.append({"text": f"Observation ({one.name}): "})
        blocks += _blocks(one.content)
    return Message.user(blocks)


def _blocks(content: Content) -> list[dict[str, Any]]:
    return [{"text": content}] if isinstance(content, str) else content


def _call(action: Any, call_id: str) -> ToolCall:
    if isinstance(action, str):
        action = {"name": action}
    if not isinstance(action, Mapping):
        raw: dict[str, Any] = {"name": None}
    else:
        raw = {"name": _first(action, _NAMES), "arguments": _first(action, _ARGUMENTS)}
    return parse_tool_call({**raw, "id": call_id}, new_id=lambda: call_id)


def _first(mapping: Mapping[str, Any], names: Iterable[str]) -> Any:
    return next((mapping[name] for name in names if mapping.get(name) is not None), None)
