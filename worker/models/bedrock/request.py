"""Translates the fleet's messages, tools and output format into a body of Converse. Pure."""

import base64
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

from stepfleet.orchestrator.models.media import Media, media_of
from stepfleet.orchestrator.models.services import SERVICES
from stepfleet.orchestrator.models.support import support_at
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
    alternating_turns,
    is_strict,
    json_text,
    reasoning_of,
    safe_name,
    with_reasoning,
)

_CLAUDE = re.compile(r"claude-(?:[a-z]+-)?(\d+)(?:-(\d{1,2}))?(?!\d)")
_NOVA = re.compile(r"amazon\.nova-")
_GPT = re.compile(r"openai\.gpt-")
_CACHES_FROM = (3, 5)
_CACHES_NOT = "claude-3-5-sonnet-20240620"


def provider_of(model: str) -> str:
    """Return the name under which reasoning of the model is kept: no other family gets it."""
    return "bedrock" + ("/claude" if "claude" in model else "/nova" if _NOVA.search(model) else "")


def caches_prompts(model: str) -> bool:
    """Return whether the model takes cache points; others refuse the request."""
    newer = _claude(model) >= _CACHES_FROM and _CACHES_NOT not in model
    return newer or _NOVA.search(model) is not None


def caches_tools(model: str) -> bool:
    """Return whether a cache point may follow the tools."""
    return caches_prompts(model) and "claude" in model


def thinks(model: str, settings: ModelSettings) -> bool:
    """Return whether a Claude thinks: it then refuses to be forced to a call."""
    kind = _thinking(settings).get("type") if "claude" in model else None
    return kind in ("enabled", "adaptive")


def reasoning_fields(model: str, settings: ModelSettings) -> dict[str, Any]:
    """Return the fields of the model's own that say how it is to reason."""
    effort = settings.reasoning_effort
    if "claude" in model:
        thinking = _thinking(settings)
        return {"thinking": thinking} if thinking else {}
    if effort is None:
        return {}
    least = "low" if effort == "minimal" else effort
    if _NOVA.search(model):
        if effort == "none":
            return {"reasoningConfig": {"type": "disabled"}}
        return {"reasoningConfig": {"type": "enabled", "maxReasoningEffort": least}}
    if _GPT.search(model):  # cannot be switched off
        return {"reasoning_effort": "low" if effort == "none" else least}
    return {}


def effort_of(model: str, settings: ModelSettings) -> str | None:
    """Return the effort that Converse itself takes; None where the model has its own field."""
    effort = settings.reasoning_effort
    if effort in (None, "none") or settings.reasoning_budget:
        return None
    if _NOVA.search(model) or _GPT.search(model):
        return None
    return "low" if effort == "minimal" else effort


def _thinking(settings: ModelSettings) -> dict[str, Any]:
    if settings.reasoning_budget:
        return {"type": "enabled", "budget_tokens": settings.reasoning_budget}
    if settings.reasoning_budget == 0 or settings.reasoning_effort == "none":
        return {"type": "disabled"}
    return {"type": "adaptive"} if settings.reasoning_effort else {}


def _claude(model: str) -> tuple[int, int]:
    """Return the version of a Claude; (0, 0) for other models."""
    found = _CLAUDE.search(model)
    return (int(found[1]), int(found[2] or 0)) if found else (0, 0)


_POINT = {"cachePoint": {"type": "default"}}
_NOTHING = {"text": "(empty)"}
"""The text of a result without any: the service refuses blank ones."""
_NOT_IN_A_DOCUMENTS_NAME = re.compile(r"[^A-Za-z0-9 ()\[\]-]+")
_DOCUMENTS_NAME = 190
_FORMATS = {"jpg": "jpeg", "json": "txt"}
"""Formats that the service knows by another name."""
_NO_POINT_AFTER = ("document", "video")


def request_body(request: ModelRequest) -> dict[str, Any]:
    """Return the body of `request`. `extra_body` is merged last and may overrule every field."""
    settings, model = request.settings, request.model
    system = [
        {"text": one.text} for one in request.messages if one.is_system() and one.text.strip()
    ]
    turns = alternating_turns(
        (one for one in request.messages if not one.is_system()),
        partial(_blocks, provider=provider_of(model)),
    )
    tools = [_tool(spec) for spec in request.tools]
    if not tools or request.tool_choice == "none":
        # The service has no choice of none, and refuses calls in a conversation without tools.
        tools, turns = [], _without_calls(turns)
    _finish_documents(turns)
    if settings.prompt_cache and caches_prompts(model) and not _has_points(turns):
        _mark(tools if caches_tools(model) else [], system, turns)
    body: dict[str, Any] = {"messages": turns}
    if system:
        body["system"] = system
    if tools:
        choice = _tool_choice(request)
        body["toolConfig"] = {"tools": tools, **({"toolChoice": choice} if choice else {})}
    if config := _inference(settings):
        body["inferenceConfig"] = config
    fields = reasoning_fields(model, settings) | (_parallel(request) if tools else {})
    if fields.get("thinking", {}).get("type") == "enabled" and _goes_on_without_thinking(turns):
        fields["thinking"] = {"type": "disabled"}
    if fields:
        body["additionalModelRequestFields"] = fields
    if output := _output(request):
        body["outputConfig"] = output
    if settings.service_tier:
        body["serviceTier"] = {"type": settings.service_tier}
    return body | settings.extra_body


def _goes_on_without_thinking(turns: list[dict[str, Any]]) -> bool:
    """Return whether results answer calls of a turn that does not begin with thinking.

    Another provider's model made it: Claude refuses to think before its next own turn.
    """
    last = [turn["content"][0] for turn in turns[-2:]]
    return bool(last) and "toolResult" in last[-1] and "reasoningContent" not in last[0]


def _inference(settings: ModelSettings) -> dict[str, Any]:
    fields = {
        "maxTokens": settings.max_tokens,
        "temperature": settings.temperature,
        "topP": settings.top_p,
        "stopSequences": list(settings.stop) or None,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _output(request: ModelRequest) -> dict[str, Any]:
    output: dict[str, Any] = {}
    if request.output and request.output.json_schema is not None:
        schema = json_text(request.output.json_schema)
        named = {"schema": schema, "name": request.output.name}
        output["textFormat"] = {"type": "json_schema", "structure": {"jsonSchema": named}}
    if effort := effort_of(request.model, request.settings):
        output["effort"] = effort
    return output


def _tool(spec: ToolSpec) -> dict[str, Any]:
    schema = spec.parameters or {"type": "object", "properties": {}}
    tool: dict[str, Any] = {"name": spec.name, "inputSchema": {"json": schema}}
    if spec.description:
        tool["description"] = spec.description
    if is_strict(spec, by_default=False):
        tool["strict"] = True
    return {"toolSpec": tool}


def _tool_choice(request: ModelRequest) -> dict[str, Any]:
    """Return the choice of tools; empty for `auto`, the word for which some models refuse."""
    if request.tool_choice == "auto" or thinks(request.model, request.settings):
        return {}
    return {"any": {}} if request.tool_choice == "any" else {"tool": {"name": request.tool_choice}}


def _parallel(request: ModelRequest) -> dict[str, Any]:
    switches = support_at(SERVICES["bedrock"], request.model).parallel_switch
    if request.parallel_tool_calls is not False or not switches:
        return {}
    # The model's own field; it may not repeat what toolConfig says.
    kind = {} if _tool_choice(request) else {"type": "auto"}
    return {"tool_choice": {**kind, "disable_parallel_tool_use": True}}


def _blocks(message: Message, provider: str) -> Iterator[dict[str, Any]]:
    if message.role is Role.TOOL:
        yield _result(message.tool_call_id or "", message.content, status=None)
        return
    if message.role is not Role.ASSISTANT:
        yield from _parts(message.content)
        return
    items = list(_parts(message.content))
    items += [_use(one.id, one.name, one.arguments) for one in message.tool_calls]
    yield from with_reasoning(items, reasoning_of(message, provider))


def _parts(content: Content, *, native_json: bool = False) -> Iterator[dict[str, Any]]:
    if isinstance(content, str):
        content = [{"text": content}]
    for block in content:
        # The service refuses texts that have only whitespace.
        if REASONING in block or not str(block.get("text", "-")).strip():
            continue
        if "json" in block and not (native_json and isinstance(block["json"], dict)):
            yield {"text": json_text(block["json"])}
        else:
            yield _part(block)


def _part(block: Block) -> dict[str, Any]:
    """Return one block in the service's form; kinds unknown here pass unchanged."""
    if "text" in block:
        return {"text": str(block["text"])}
    if "toolUse" in block:
        used = block["toolUse"]
        return _use(used["toolUseId"], used["name"], used.get("input", {}))
    if "toolResult" in block:
        given = block["toolResult"]
        return _result(given["toolUseId"], given.get("content", ""), status=given.get("status"))
    media = media_of(block)
    return block if media is None else _media(media)


def _use(call_id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    named = {"toolUseId": call_id, "name": safe_name(name) or NO_NAME}
    return {"toolUse": {**named, "input": arguments}}


def _result(call_id: str, content: Content, *, status: str | None) -> dict[str, Any]:
    parts = list(_parts(content, native_json=True)) or [_NOTHING]
    result: dict[str, Any] = {"toolUseId": call_id, "content": parts}
    return {"toolResult": result | {"status": status} if status else result}


def _media(media: Media) -> dict[str, Any]:
    source: dict[str, Any] = {"bytes": media.data}
    if media.url:
        source = {"s3Location": {"uri": media.url}}
    elif media.source == "text":
        source = {"bytes": base64.b64encode(media.value.encode()).decode()}
    named = {"name": media.name} if media.kind == "document" else {}
    form = _FORMATS.get(media.form, media.form)
    return {media.kind: {"format": form, "source": source, **named}}


def _finish_documents(turns: list[dict[str, Any]]) -> None:
    """Give documents names that the service takes, each once, and a text with them."""
    seen: set[str] = set()
    for turn in turns:
        for document in _documents(turn["content"]):
            document["name"] = _documents_name(str(document.get("name", "")), seen)
            seen.add(document["name"])
        alone = not any("text" in block for block in turn["content"])
        if alone and any("document" in block for block in turn["content"]):
            turn["content"].append({"text": "(a document)"})


def _documents(blocks: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for block in blocks:
        if isinstance(block.get("document"), dict):
            yield block["document"]
        elif "toolResult" in block:
            yield from _documents(block["toolResult"]["content"])


def _documents_name(given: str, seen: set[str]) -> str:
    # Letters, digits, single spaces, hyphens, brackets: no dots.
    words = _NOT_IN_A_DOCUMENTS_NAME.sub(" ", given).split()
    name = " ".join(words)[:_DOCUMENTS_NAME].strip() or "document"
    return f"{name} ({len(seen) + 1})" if name in seen else name


def _without_calls(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the turns with calls and results as text, without the reasoning about them."""
    names: dict[str, str] = {}
    if not any("toolUse" in block for turn in turns for block in turn["content"]):
        return turns
    plain: list[dict[str, Any]] = []
    for turn in turns:
        content = [one for block in turn["content"] for one in _as_text(block, names)]
        if content:
            plain.append({**turn, "content": content})
    return plain


def _as_text(block: dict[str, Any], names: dict[str, str]) -> Iterator[dict[str, Any]]:
    if "toolUse" in block:
        used = block["toolUse"]
        names[used["toolUseId"]] = used["name"]
        call = {"tool": used["name"], "arguments": used["input"]}
        yield {"text": json_text(call)}
    elif "toolResult" in block:
        given = block["toolResult"]
        yield {"text": f"Result of {names.get(given['toolUseId'], 'a tool')}:"}
        yield from _parts(given["content"])
    elif "reasoningContent" not in block:
        yield block


def _has_points(turns: list[dict[str, Any]]) -> bool:
    """Return whether the user has chosen what is cached.

    The service takes four points in all, and none of an hour after a shorter one.
    """
    return any("cachePoint" in block for turn in turns for block in turn["content"])


def _mark(
    tools: list[dict[str, Any]], system: list[dict[str, Any]], turns: list[dict[str, Any]]
) -> None:
    """Mark what may be cached: the fixed beginning, and the ends of the last two user turns.

    The service looks only some blocks back from a mark for what it has cached: the mark where the
    previous request ended finds that request's entry, however long the answer between them is.
    """
    fixed = system or tools
    if fixed:
        fixed.append(_POINT)
    users = [turn["content"] for turn in turns if turn["role"] == "user"]
    for content in users[-2:]:
        end = len(content)
        while end and any(kind in content[end - 1] for kind in _NO_POINT_AFTER):
            end -= 1
        if end:
            content.insert(end, _POINT)
