"""Translates the fleet's messages, tools and output format into a body of Responses. Pure."""

import re
from collections.abc import Iterator
from typing import Any

from stepfleet.orchestrator.models.media import Media, media_of
from stepfleet.orchestrator.records.calls.tools import ToolSpec
from stepfleet.orchestrator.records.conversation.messages import (
    REASONING,
    Block,
    Content,
    Message,
    Role,
)
from stepfleet.orchestrator.records.responses import ModelRequest, ModelSettings
from stepfleet.worker.models.bodies import (
    NO_NAME,
    is_strict,
    json_text,
    reasoning_of,
    safe_name,
    with_reasoning,
)
from stepfleet.worker.models.openai.request import response_format
from stepfleet.worker.models.sent_back import PHASE, SentBack, fields_of_answer, model_at

PROVIDER, SERVICE = "openai", "openai-responses"
_WITHOUT_REASONING = re.compile(r"(?:ft:)?(?:gpt-[34]|chatgpt-|gpt-\d[\d.]*-chat)")
"""Models that do not reason: the service refuses them the request for encrypted reasoning."""
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def request_body(request: ModelRequest) -> dict[str, Any]:
    """Return the body of `request`. `extra_body` is merged last and may overrule every field.

    The service stores nothing; what it needs of its reasoning again comes back encrypted.
    """
    body: dict[str, Any] = {
        "model": request.model,
        "input": _input(request),
        "store": False,
    }
    if not _WITHOUT_REASONING.match(request.model):
        body["include"] = ["reasoning.encrypted_content"]
    if request.tools:
        body["tools"] = [_tool(one) for one in request.tools]
        choice = _CHOICES.get(request.tool_choice)
        body["tool_choice"] = choice or {"type": "function", "name": request.tool_choice}
        if request.parallel_tool_calls is not None:
            body["parallel_tool_calls"] = request.parallel_tool_calls
    if request.output:
        body["text"] = {"format": _format(response_format(request.output))}
    return body | _sampling(request.settings) | request.settings.extra_body


def _input(request: ModelRequest) -> list[dict[str, Any]]:
    """Return the items of the conversation; calls have the ids that the model gave them."""
    by = model_at(SERVICE, request.model)
    items = [item for message in request.messages for item in _items(message, by)]
    back = SentBack(request.messages, by)
    for item in items:
        if call_id := item.get("call_id"):
            item["call_id"] = back.id_of(call_id)
    return items


def _sampling(settings: ModelSettings) -> dict[str, Any]:
    effort = settings.reasoning_effort
    fields = {
        "max_output_tokens": settings.max_tokens,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "reasoning": {"effort": effort} if effort else None,
        "service_tier": settings.service_tier,
        "stream": settings.stream or None,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _tool(spec: ToolSpec) -> dict[str, Any]:
    # Without the field the service demands what strict mode does, and changes schemas to fit.
    return {
        "type": "function",
        "name": spec.name,
        "description": spec.description,
        "parameters": spec.parameters or {"type": "object", "properties": {}},
        "strict": is_strict(spec, by_default=True),
    }


def _format(chat: dict[str, Any]) -> dict[str, Any]:
    """Return the form of an answer as Responses has it: what chat completions nest is flat."""
    return {"type": chat["type"], **chat.get("json_schema", {})}


def _items(message: Message, by: str) -> Iterator[dict[str, Any]]:
    if message.role is Role.TOOL:
        yield _result(message.tool_call_id or "", message.content)
    elif message.role is Role.ASSISTANT:
        yield from _answer(message, by)
    else:
        yield from _given(message)


def _answer(message: Message, by: str) -> Iterator[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if message.text:
        phase = fields_of_answer(message, by, reasoning=False).get(PHASE, "")
        items.append(said_in(phase, message.text))
    blocks = message.content if isinstance(message.content, list) else []
    used = [block["toolUse"] for block in blocks if "toolUse" in block]
    items += [_call(one["toolUseId"], one["name"], one.get("input", {})) for one in used]
    items += [_call(one.id, one.name, one.arguments) for one in message.tool_calls]
    yield from with_reasoning(items, reasoning_of(message, PROVIDER))


def said_in(phase: str, text: str) -> dict[str, Any]:
    """Return the item of what a model said; the service asks for the phase that it gave it."""
    phased = {PHASE: phase} if phase else {}
    return {"type": "message", "role": "assistant", "content": text, **phased}


def _given(message: Message) -> Iterator[dict[str, Any]]:
    content = message.content
    if isinstance(content, list):
        results = [block["toolResult"] for block in content if "toolResult" in block]
        yield from (_result(one["toolUseId"], one.get("content", "")) for one in results)
        content = [block for block in content if "toolResult" not in block]
        if results and not content:
            return
    yield {"type": "message", "role": message.role.value, "content": _content(content)}


def _call(call_id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "function_call",
        "call_id": call_id,
        "name": safe_name(name) or NO_NAME,
        "arguments": json_text(arguments),
    }


def _result(call_id: str, content: Content) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": _content(content)}


def _content(content: Content) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    return [_part(block) for block in content if REASONING not in block]


def _part(block: Block) -> dict[str, Any]:
    """Return one block in the service's form; kinds unknown here pass unchanged."""
    if "type" in block:
        return block
    if "text" in block or "json" in block:
        text = str(block["text"]) if "text" in block else json_text(block["json"])
        return {"type": "input_text", "text": text}
    media = media_of(block)
    return block if media is None else _media(media)


def _media(media: Media) -> dict[str, Any]:
    if media.kind == "image":
        field = "file_id" if media.source == "file_id" else "image_url"
        value = media.value if field == "file_id" else media.address
        return {"type": "input_image", field: value, "detail": media.detail}
    match media.source:
        case "file_id":
            return {"type": "input_file", "file_id": media.value}
        case "url":
            return {"type": "input_file", "file_url": media.value}
    return {"type": "input_file", "filename": media.name, "file_data": media.address}
