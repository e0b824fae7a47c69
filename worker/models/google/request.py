"""Translates the fleet's messages, tools and output format into a body of Gemini. Pure."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from stepfleet.orchestrator.models.media import media_of
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
    alternating_turns,
    json_text,
    reasoning_of,
    safe_name,
)

PROVIDER = "google"
_MODES = {"auto": "AUTO", "any": "ANY", "none": "NONE"}
_FOREIGN = "skip_thought_signature_validator"
"""The service's word for calls that another provider's model made: they have no signature."""


def request_body(request: ModelRequest) -> dict[str, Any]:
    """Return the body of `request`. `extra_body` is merged last and may overrule every field."""
    names = {call.id: call.name for one in request.messages for call in one.tool_calls}
    body: dict[str, Any] = {
        "contents": alternating_turns(
            (one for one in request.messages if not one.is_system()),
            partial(_parts_of, names=names),
            assistant="model",
            field="parts",
        )
    }
    system = [{"text": one.text} for one in request.messages if one.is_system() and one.text]
    if system:
        body["systemInstruction"] = {"parts": system}
    if request.tools:
        declared = [_tool(one.name, one.description, one.parameters) for one in request.tools]
        body["tools"] = [{"functionDeclarations": declared}]
        body["toolConfig"] = {"functionCallingConfig": _choice(request.tool_choice)}
    if config := _generation(request):
        body["generationConfig"] = config
    if request.settings.service_tier:
        body["serviceTier"] = request.settings.service_tier
    return body | request.settings.extra_body


def _generation(request: ModelRequest) -> dict[str, Any]:
    settings, output = request.settings, request.output
    fields = {
        "temperature": settings.temperature,
        "topP": settings.top_p,
        "maxOutputTokens": settings.max_tokens,
        "stopSequences": list(settings.stop) or None,
        "seed": settings.seed,
        "responseMimeType": "application/json" if output else None,
        "responseJsonSchema": output.json_schema if output else None,
        "thinkingConfig": _thinking(settings),
    }
    return {name: value for name, value in fields.items() if value is not None}


def _thinking(settings: ModelSettings) -> dict[str, Any] | None:
    if settings.reasoning_budget is not None:
        return {"thinkingBudget": settings.reasoning_budget}
    if settings.reasoning_effort is None:
        return None
    if settings.reasoning_effort == "none":
        return {"thinkingBudget": 0}
    return {"thinkingLevel": settings.reasoning_effort.upper()}


def _tool(name: str, description: str, parameters: dict[str, Any]) -> dict[str, Any]:
    schema = parameters or {"type": "object", "properties": {}}
    return {"name": name, "description": description, "parametersJsonSchema": schema}


def _choice(choice: str) -> dict[str, Any]:
    if choice in _MODES:
        return {"mode": _MODES[choice]}
    return {"mode": "ANY", "allowedFunctionNames": [choice]}


def _parts_of(message: Message, names: dict[str, str]) -> Iterator[dict[str, Any]]:
    if message.role is Role.TOOL:
        call_id = message.tool_call_id or ""
        yield _result(call_id, message.name or names.get(call_id, ""), message.content)
        return
    parts = list(_parts(message.content, names))
    if message.role is Role.ASSISTANT:
        parts += [_call(one.id, one.name, one.arguments) for one in message.tool_calls]
        parts = _signed(parts, reasoning_of(message, PROVIDER))
    yield from parts


def _signed(
    parts: list[dict[str, Any]], reasoning: list[tuple[int, dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Return the parts with the signatures that they came with.

    The service refuses the first call of an answer without one.
    """
    signed = list(parts)
    for at, data in reasoning:
        if at < len(parts):
            signed[at] = {**parts[at], **data}
        else:
            signed.append({"text": "", **data})
    first = next((i for i, part in enumerate(signed) if "functionCall" in part), None)
    if first is not None and not any("thoughtSignature" in part for part in signed):
        signed[first] = {**signed[first], "thoughtSignature": _FOREIGN}
    return signed


def _parts(content: Content, names: dict[str, str]) -> Iterator[dict[str, Any]]:
    if isinstance(content, str):
        content = [{"text": content}] if content else []
    for block in content:
        if REASONING not in block and block.get("text") != "":
            yield _part(block, names)


def _part(block: Block, names: dict[str, str]) -> dict[str, Any]:
    """Return one block in the service's form; kinds unknown here pass unchanged."""
    if "text" in block or "json" in block:
        return {"text": str(block["text"]) if "text" in block else json_text(block["json"])}
    if "toolUse" in block:
        used = block["toolUse"]
        names[used["toolUseId"]] = used["name"]
        return _call(used["toolUseId"], used["name"], used.get("input", {}))
    if "toolResult" in block:
        given = block["toolResult"]
        call_id = given["toolUseId"]
        return _result(call_id, names.get(call_id, ""), given.get("content", ""))
    media = media_of(block)
    if media is None:
        return block
    if media.url:
        return {"fileData": {"mimeType": media.media_type, "fileUri": media.url}}
    return {"inlineData": {"mimeType": media.media_type, "data": media.data}}


def _call(call_id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    named = safe_name(name) or NO_NAME
    return {"functionCall": {"id": call_id, "name": named, "args": arguments}}


def _result(call_id: str, name: str, content: Content) -> dict[str, Any]:
    parts = [] if isinstance(content, str) else list(_parts(content, {}))
    texts = [content] if isinstance(content, str) else [part.get("text", "") for part in parts]
    result: dict[str, Any] = {
        "id": call_id,
        "name": safe_name(name) or NO_NAME,
        "response": {"result": "".join(texts)},
    }
    if media := [part for part in parts if "inlineData" in part or "fileData" in part]:
        result["parts"] = media
    return {"functionResponse": result}
