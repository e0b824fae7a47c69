"""Reads a request of Responses as one of chat completions, as strictly as the service. Pure."""

from collections.abc import Iterator
from typing import Any

from stepfleet.worker.testing.wire import MisfitError

PATH = "/v1/responses"
_FIELDS = {
    "model", "input", "instructions", "store", "include", "tools", "tool_choice", "text",
    "parallel_tool_calls", "max_output_tokens", "temperature", "top_p", "reasoning",
    "service_tier", "stream", "metadata", "prompt_cache_key", "truncation",
}  # fmt: skip
_PARTS = {"input_text": "text", "input_image": "image_url", "input_file": "file"}


def conversation(body: dict[str, Any], _path: str) -> dict[str, Any]:
    """Return the request as one of chat completions. Raises `MisfitError`."""
    if unknown := sorted(body.keys() - _FIELDS):
        raise MisfitError(unknown[0], "Unknown parameter")
    given = body.get("input")
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise MisfitError("input", "Missing required parameter")
    chat: dict[str, Any] = {"model": body.get("model"), "messages": [*_messages(given)]}
    if body.get("tools"):
        chat["tools"] = [_tool(tool) for tool in body["tools"]]
        choice = body.get("tool_choice", "auto")
        if isinstance(choice, dict):
            choice = {"type": "function", "function": {"name": choice.get("name")}}
        chat["tool_choice"] = choice
    if body.get("stream"):
        chat |= {"stream": True, "stream_options": {"include_usage": True}}
    return chat


def encrypted(thought: str) -> str:
    """Return the encrypted form of a thought, as the server gives it."""
    return f"encrypted:{thought[::-1]}"


def _messages(items: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the messages: text and calls of one answer are items of their own here."""
    answer: dict[str, Any] | None = None
    for number, item in enumerate(items):
        place, kind = f"input[{number}]", item.get("type", "message")
        if kind == "reasoning":
            if not str(item.get("encrypted_content")).startswith("encrypted:"):
                raise MisfitError(f"{place}.encrypted_content", "could not be verified")
        elif kind == "message" and item.get("role") == "assistant":
            if answer:
                yield answer
            answer = {"role": "assistant", "content": _content(item.get("content"), place)}
        elif kind == "function_call":
            answer = answer or {"role": "assistant", "content": None}
            answer["tool_calls"] = [*answer.get("tool_calls", ()), _call(item)]
        else:
            if answer:
                yield answer
            answer = None
            yield _other(item, kind, place)
    if answer:
        yield answer


def _other(item: dict[str, Any], kind: str, place: str) -> dict[str, Any]:
    if kind == "function_call_output":
        output = _content(item.get("output"), place)
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
    if kind != "message":
        raise MisfitError(f"{place}.type", f"Invalid value: {kind!r}")
    return {"role": item.get("role"), "content": _content(item.get("content"), place)}


def _call(item: dict[str, Any]) -> dict[str, Any]:
    function = {"name": item.get("name"), "arguments": item.get("arguments")}
    return {"id": item.get("call_id"), "type": "function", "function": function}


def _content(content: Any, place: str) -> Any:
    if not isinstance(content, list):
        return content
    for part in content:
        if part.get("type") not in _PARTS:
            raise MisfitError(f"{place}.content", f"Invalid value: {part.get('type')!r}")
    if all(part["type"] == "input_text" for part in content):
        return "".join(str(part.get("text", "")) for part in content)
    return [{**part, "type": _PARTS[part["type"]]} for part in content]


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    if "strict" not in tool:
        raise MisfitError("tools.strict", "say whether the schema is strict")
    function = {"name": tool.get("name"), "parameters": tool.get("parameters")}
    return {"type": tool.get("type"), "function": function}
