"""Translates the fleet's messages, tools and output format into a chat completion's body. Pure.

Only roles, text, media and calls are sent; a message's metadata never is.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from stepfleet.orchestrator.models.media import Media, media_of
from stepfleet.orchestrator.models.services import SERVICES, Service
from stepfleet.orchestrator.records.calls.tools import ToolSpec
from stepfleet.orchestrator.records.conversation.messages import (
    REASONING,
    Block,
    Content,
    Message,
    Role,
)
from stepfleet.orchestrator.records.responses import ModelRequest, ModelSettings, OutputFormat
from stepfleet.orchestrator.tools.schemas.handles import fits_strict_mode
from stepfleet.worker.models.bodies import NO_NAME, is_strict, json_text, reasoning_of, safe_name
from stepfleet.worker.models.sent_back import (
    SentBack,
    before_text,
    fields_of_answer,
    model_at,
    sign_foreign,
)

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a service departs from the protocol; `at` is what it does not take.

    `service` is its name: answers go back to its models with what these have given. `reasoning`
    names the field of answers that goes back with them. `is_gemini`: calls must be signed.
    """

    service: str = ""
    reasoning: str = ""
    at: Service = SERVICES["compatible"]
    is_gemini: bool = False


def request_body(
    request: ModelRequest, *, official: bool, to: Dialect = Dialect()
) -> dict[str, Any]:
    """Return the body of `request`.

    `official` is true for OpenAI's own service: it wants `max_completion_tokens` (newer models
    refuse `max_tokens`) and knows the developer role. Compatible servers widely read only
    `max_tokens`, and templates of open models know only the system role. `extra_body` is
    merged last and may overrule every field.
    """
    messages = wire_messages(request.messages, official=official)
    if to.reasoning:
        _add_reasoning(messages, request.messages, to.reasoning)
    _adapt(messages, request, to, official=official)
    body: dict[str, Any] = {"model": request.model, "messages": messages}
    if request.tools:
        body["tools"] = [_tool(spec, official=official) for spec in request.tools]
        body["tool_choice"] = tool_choice(request.tool_choice)
        if request.parallel_tool_calls is not None:
            body["parallel_tool_calls"] = request.parallel_tool_calls
    body |= _sampling(request.settings, official=official)
    if request.output:
        body["response_format"] = response_format(request.output)
    if request.settings.stream:
        body["stream"] = True
        body["stream_options"] = {"include_usage": True}
    for name, own in to.at.fields:
        if (value := body.pop(name, None)) is not None and own:
            body[own] = value
    return body | request.settings.extra_body


def tool_choice(choice: str) -> str | dict[str, Any]:
    """Return the wire form of `auto`, `any`, `none` or a tool's name."""
    return _CHOICES.get(choice) or {"type": "function", "function": {"name": choice}}


def wire_messages(messages: Iterable[Message], *, official: bool) -> list[dict[str, Any]]:
    """Return the conversation in wire form."""
    wires: list[dict[str, Any]] = []
    for message in messages:
        if isinstance(message.content, str):
            wires.append(_wire(message, message.content, official=official))
        else:
            wires.extend(_wires_of_blocks(message, message.content, official=official))
    return wires


def _adapt(
    wires: list[dict[str, Any]], request: ModelRequest, to: Dialect, *, official: bool
) -> None:
    """Change the messages to what the service takes, and add what it gave with its answers."""
    if to.service and any(isinstance(message.content, list) for message in request.messages):
        reasoning = to.at.takes_reasoning and not official
        by = model_at(to.service, request.model)
        _give_back(wires, request.messages, by, reasoning=reasoning)
    if to.is_gemini:
        sign_foreign(wires)
    if not to.at.names_authors:
        for wire in wires:
            wire.pop("name", None)


def _give_back(
    wires: list[dict[str, Any]], messages: Sequence[Message], by: str, *, reasoning: bool
) -> None:
    """Add to each answer what its model is to get back; an answer is always one message here."""
    back = SentBack(messages, by)
    answers = (message for message in messages if message.is_assistant())
    for wire in wires:
        if wire["role"] == Role.TOOL:
            wire["tool_call_id"] = back.id_of(wire["tool_call_id"])
        if wire["role"] != Role.ASSISTANT:
            continue
        answer = next(answers)
        wire.update(fields_of_answer(answer, by, reasoning=reasoning))
        if (before := before_text(answer, by)) and not isinstance(wire["content"], list):
            wire["content"] = before + (wire["content"] or "")
        for call in wire.get("tool_calls", ()):
            call.update(back.fields_of(call["id"]))
            call["id"] = back.id_of(call["id"])


def _add_reasoning(wires: list[dict[str, Any]], messages: Iterable[Message], field: str) -> None:
    """Add its reasoning to each answer; an answer is always one message here."""
    answers = (wire for wire in wires if wire["role"] == Role.ASSISTANT)
    given = (message for message in messages if message.is_assistant())
    for wire, message in zip(answers, given, strict=True):
        for _, data in reasoning_of(message, field):
            wire[field] = data.get(field)


def _sampling(settings: ModelSettings, *, official: bool) -> dict[str, Any]:
    limit = "max_completion_tokens" if official else "max_tokens"
    fields = {
        limit: settings.max_tokens,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "stop": list(settings.stop) or None,
        "seed": settings.seed,
        "reasoning_effort": settings.reasoning_effort,
        "service_tier": settings.service_tier,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _tool(spec: ToolSpec, *, official: bool) -> dict[str, Any]:
    parameters = spec.parameters or {"type": "object", "properties": {}}
    function: dict[str, Any] = {
        "name": spec.name,
        "description": spec.description,
        "parameters": parameters,
    }
    if is_strict(spec, by_default=official):
        function["strict"] = True
    return {"type": "function", "function": function}


def _wire(message: Message, content: Content, *, official: bool) -> dict[str, Any]:
    role = message.role
    if role is Role.TOOL:
        answer = _content(content)
        return {"role": "tool", "tool_call_id": message.tool_call_id or "", "content": answer}
    if role is Role.ASSISTANT:
        return _assistant(message, content)
    if role is Role.DEVELOPER and not official:
        role = Role.SYSTEM
    return _named(message, {"role": role.value, "content": _content(content)})


def _wires_of_blocks(
    message: Message, blocks: list[Block], *, official: bool
) -> Iterator[dict[str, Any]]:
    if message.role is Role.TOOL:
        yield _wire(message, blocks, official=official)
        return
    results, rest = _split_results(blocks)
    yield from results
    if rest or not results or message.role is Role.ASSISTANT:
        yield _wire(message, rest, official=official)


def _assistant(message: Message, content: Content) -> dict[str, Any]:
    calls = [_call(one.id, one.name, one.arguments) for one in message.tool_calls]
    if isinstance(content, list):
        used = [block["toolUse"] for block in content if "toolUse" in block]
        calls += [_call(one["toolUseId"], one["name"], one.get("input", {})) for one in used]
        content = [block for block in content if "toolUse" not in block]
    text = _content(content)
    wire: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None}
    if calls:
        wire["tool_calls"] = calls
    return _named(message, wire)


def _named(message: Message, wire: dict[str, Any]) -> dict[str, Any]:
    return wire | {"name": safe_name(message.name)} if message.name else wire


def _call(call_id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    text = json_text(arguments)
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": safe_name(name) or NO_NAME, "arguments": text},
    }


def _split_results(blocks: list[Block]) -> tuple[list[dict[str, Any]], list[Block]]:
    """Part the tool results of a block list, each its own message, from the other blocks."""
    results = [block["toolResult"] for block in blocks if "toolResult" in block]
    rest = [block for block in blocks if "toolResult" not in block]
    wires = [
        {
            "role": "tool",
            "tool_call_id": one["toolUseId"],
            "content": _content(one.get("content", "")),
        }
        for one in results
    ]
    return wires, rest


def _content(content: Content) -> str | list[dict[str, Any]]:
    """Return plain text as text (which every server reads), anything else as parts."""
    if isinstance(content, str):
        return content
    # Reasoning goes only to providers that made it.
    parts = [_part(block) for block in content if REASONING not in block]
    if all(part.get("type") == "text" for part in parts):
        return "".join(str(part.get("text", "")) for part in parts)
    return parts


def _part(block: Block) -> dict[str, Any]:
    """Return one block as a content part; kinds unknown here pass unchanged."""
    if "type" in block:
        return block
    if "text" in block:
        return {"type": "text", "text": block["text"]}
    if "json" in block:
        return {"type": "text", "text": json.dumps(block["json"], ensure_ascii=False)}
    media = media_of(block)
    return block if media is None else _media(media)


def _media(media: Media) -> dict[str, Any]:
    if media.kind == "image":
        detail = {"detail": media.detail} if media.detail != "auto" else {}
        return {"type": "image_url", "image_url": {"url": media.address, **detail}}
    if media.kind == "audio":
        audio = {"data": media.data, "format": media.form}
        return {"type": "input_audio", "input_audio": audio}
    if media.source == "file_id":
        return {"type": "file", "file": {"file_id": media.value}}
    return {"type": "file", "file": {"filename": media.name, "file_data": media.address}}


def response_format(output: OutputFormat) -> dict[str, Any]:
    """Return the body's `response_format`.

    Strict mode, in which the service guarantees the schema, is requested only for schemas that it
    supports: the service refuses a request with any other.
    """
    if output.json_schema is None:
        return {"type": "json_object"}
    name = safe_name(output.name) or "response"
    return {
        "type": "json_schema",
        "json_schema": {
            "name": name,
            "schema": output.json_schema,
            "strict": fits_strict_mode(output.json_schema),
        },
    }
