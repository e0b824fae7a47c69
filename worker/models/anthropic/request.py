"""Translates the fleet's messages, tools and output format into a body of Messages. Pure."""

from collections.abc import Iterator, Mapping
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
    MOST_REASONING,
    NO_NAME,
    WHOLE_TURN,
    alternating_turns,
    is_strict,
    json_text,
    reasoning_block,
    reasoning_of,
    safe_name,
    with_reasoning,
    word,
)
from stepfleet.worker.models.sent_back import SentBack, model_at

PROVIDER = "anthropic"
MOST_TOKENS = 16_384
"""Tokens of an answer where `settings.max_tokens` is not set: the service wants a number."""

_SERVER_CALLS = ("server_tool_use", "mcp_tool_use")
_BEGINS = (*_SERVER_CALLS, "thinking", "redacted_thinking")
_CHOICES = {"auto": "auto", "any": "any", "none": "none"}
_MARKED = "cache_control"
_MARK = {"type": "ephemeral"}
_PARTS = ("tools", "system", "messages")
_THINKS = ("enabled", "adaptive")


def request_body(request: ModelRequest) -> dict[str, Any]:
    """Return the body of `request`. `extra_body` is merged last and may overrule every field."""
    settings = request.settings
    system = [part for one in request.messages if one.is_system() for part in _system(one)]
    messages = alternating_turns((one for one in request.messages if not one.is_system()), _blocks)
    _give_back(messages, request)
    body: dict[str, Any] = {
        "model": request.model,
        "max_tokens": _most_tokens(settings),
        "messages": messages,
    }
    tools = [_tool(spec) for spec in request.tools]
    if settings.prompt_cache and not _has_marks(system, messages, settings.extra_body):
        _mark(tools, system, messages)
    if system:
        body["system"] = system
    if tools:
        body["tools"] = tools
        body["tool_choice"] = _tool_choice(request)
    output = _output(request)
    if output:
        body["output_config"] = output
    body |= _sampling(settings)
    if body.get("thinking", {}).get("type") == "enabled" and _goes_on_without_thinking(messages):
        body["thinking"] = {"type": "disabled"}
    return body | settings.extra_body


def uses_server_tools(content: list[dict[str, Any]]) -> bool:
    """Return whether a turn has calls that the service made itself, or results of them."""
    kinds = [word(block.get("type")) for block in content]
    return any(kind in _SERVER_CALLS or kind.endswith("_tool_result") for kind in kinds)


def whole_turn(content: list[dict[str, Any]], *, is_over: bool) -> tuple[Block, ...]:
    """Return the blocks of a turn among the service's own tools: it goes back whole.

    Their place is the number of calls before them; these are sent with the ids that others know.
    A turn that `is_over` ends with nothing that the service had begun.
    """
    known = [block for block in content if _takes(block)]
    while is_over and known and known[-1]["type"] in _BEGINS:
        known.pop()
    found: list[Block] = []
    calls = 0
    for block in known:
        if block["type"] == "tool_use":
            calls += 1
        elif len(found) < MOST_REASONING:
            found.append(reasoning_block(PROVIDER, calls, {"type": WHOLE_TURN, "block": block}))
    return tuple(found)


def _takes(block: dict[str, Any]) -> bool:
    """Return whether the service takes back a block of its own: no blank text."""
    kind = block.get("type")
    return isinstance(kind, str) and (kind != "text" or bool(word(block.get("text")).strip()))


def _give_back(turns: list[dict[str, Any]], request: ModelRequest) -> None:
    """Add to calls what a proxy must get back with them."""
    back = SentBack(request.messages, model_at(PROVIDER, request.model))
    for turn in turns:
        for block in turn["content"]:
            if block.get("type") == "tool_use":
                block.update(back.fields_of(block["id"]))


def _most_tokens(settings: ModelSettings) -> int:
    return settings.max_tokens or MOST_TOKENS + (settings.reasoning_budget or 0)


def _sampling(settings: ModelSettings) -> dict[str, Any]:
    fields = {
        "stop_sequences": list(settings.stop) or None,
        "service_tier": settings.service_tier,
        "stream": settings.stream or None,
        "thinking": _thinking(settings) or None,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _thinking(settings: ModelSettings) -> dict[str, Any]:
    """Return how the model is to think; empty where the service decides."""
    if settings.reasoning_budget:
        return {"type": "enabled", "budget_tokens": settings.reasoning_budget}
    if settings.reasoning_budget == 0 or settings.reasoning_effort == "none":
        return {"type": "disabled"}
    return {"type": "adaptive"} if settings.reasoning_effort else {}


def _goes_on_without_thinking(turns: list[dict[str, Any]]) -> bool:
    """Return whether results answer calls of a turn that does not begin with thinking.

    Another provider's model made it: the service refuses to think before its next own turn.
    """
    last = [turn["content"][0]["type"] for turn in turns[-2:]]
    return last[1:] == ["tool_result"] and "thinking" not in last[0]


def _output(request: ModelRequest) -> dict[str, Any]:
    output: dict[str, Any] = {}
    if request.output and request.output.json_schema is not None:
        output["format"] = {"type": "json_schema", "schema": request.output.json_schema}
    effort = request.settings.reasoning_effort
    if effort and effort != "none" and not request.settings.reasoning_budget:
        output["effort"] = "low" if effort == "minimal" else effort
    return output


def _tool(spec: ToolSpec) -> dict[str, Any]:
    schema = spec.parameters or {"type": "object", "properties": {}}
    tool: dict[str, Any] = {"name": spec.name, "input_schema": schema}
    if spec.description:
        tool["description"] = spec.description
    # Only where it is requested: the service takes 20 such tools at most, and compiles each first.
    return tool | {"strict": True} if is_strict(spec, by_default=False) else tool


def _tool_choice(request: ModelRequest) -> dict[str, Any]:
    kind = _CHOICES.get(request.tool_choice)
    if kind not in ("auto", "none") and _thinking(request.settings).get("type") in _THINKS:
        kind = "auto"  # the service refuses to force a call while the model thinks
    choice: dict[str, Any] = {"type": kind} if kind else {"type": "tool"}
    if kind is None:
        choice["name"] = request.tool_choice
    if request.parallel_tool_calls is False and kind != "none":
        choice["disable_parallel_tool_use"] = True
    return choice


def _system(message: Message) -> list[dict[str, Any]]:
    parts = [] if isinstance(message.content, str) else list(_parts(message.content))
    if _are_marked(parts):
        return parts
    return [_text(message.text)] if message.text.strip() else []


def _blocks(message: Message) -> Iterator[dict[str, Any]]:
    if message.role is Role.TOOL:
        yield _result(message.tool_call_id or "", message.content, status=None)
        return
    if message.role is not Role.ASSISTANT:
        yield from _parts(message.content)
        return
    reasoning = reasoning_of(message, PROVIDER)
    uses = [_use(one.id, one.name, one.arguments) for one in message.tool_calls]
    if reasoning and reasoning[0][1].get("type") == WHOLE_TURN:
        for before, (at, data) in enumerate(reasoning):
            uses.insert(at + before, data["block"])
        yield from uses
        return
    yield from with_reasoning([*_parts(message.content), *uses], reasoning)


def _parts(content: Content) -> Iterator[dict[str, Any]]:
    if isinstance(content, str):
        content = [{"text": content}]
    for block in content:
        # The service refuses texts that have only whitespace.
        if REASONING not in block and str(block.get("text", "-")).strip():
            yield _part(block)


def _part(block: Block) -> dict[str, Any]:
    """Return one block in the service's form; kinds unknown here pass unchanged."""
    if "type" in block:
        return block
    if "text" in block:
        return _text(str(block["text"]))
    if "json" in block:
        return _text(json_text(block["json"]))
    if "toolUse" in block:
        used = block["toolUse"]
        return _use(used["toolUseId"], used["name"], used.get("input", {}))
    if "toolResult" in block:
        given = block["toolResult"]
        return _result(given["toolUseId"], given.get("content", ""), status=given.get("status"))
    media = media_of(block)
    return block if media is None else _media(media)


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _use(call_id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "tool_use",
        "id": call_id,
        "name": safe_name(name) or NO_NAME,
        "input": arguments,
    }


def _result(call_id: str, content: Content, *, status: str | None) -> dict[str, Any]:
    result: dict[str, Any] = {"type": "tool_result", "tool_use_id": call_id}
    if parts := list(_parts(content)):
        result["content"] = content if isinstance(content, str) else parts
    return result | {"is_error": True} if status == "error" else result


def _media(media: Media) -> dict[str, Any]:
    if media.kind == "image":
        return {"type": "image", "source": _source(media)}
    return {"type": "document", "source": _source(media), "title": media.name}


def _source(media: Media) -> dict[str, Any]:
    match media.source:
        case "url":
            return {"type": "url", "url": media.value}
        case "text":
            return {"type": "text", "media_type": "text/plain", "data": media.value}
        case "file_id":
            return {"type": "file", "file_id": media.value}
    return {"type": "base64", "media_type": media.media_type, "data": media.value}


def _has_marks(
    system: list[dict[str, Any]], turns: list[dict[str, Any]], extra_body: Mapping[str, Any]
) -> bool:
    """Return whether the user has chosen what is cached.

    The service takes four marks in all, and none of an hour behind a shorter one.
    """
    given = (system, turns, *map(extra_body.get, _PARTS))
    return _MARKED in extra_body or any(map(_are_marked, given))


def _are_marked(blocks: Any, levels: int = 3) -> bool:
    """Return whether one has a mark, or what is in it: in a turn, a result and what that has."""
    found = blocks if isinstance(blocks, list) and levels else ()
    return any(
        isinstance(one, dict)
        and (one.get(_MARKED) is not None or _are_marked(one.get("content"), levels - 1))
        for one in found
    )


def _mark(
    tools: list[dict[str, Any]], system: list[dict[str, Any]], turns: list[dict[str, Any]]
) -> None:
    """Mark what may be cached: the fixed beginning, and the ends of the last two user turns.

    The service looks only some blocks back from a mark for what it has cached: the mark where the
    previous request ended finds that request's entry, however long the answer between them is.
    """
    fixed = system or tools
    if fixed:
        fixed[-1]["cache_control"] = _MARK
    users = [turn for turn in turns if turn["role"] == "user"]
    for turn in users[-2:]:
        turn["content"][-1] = {**turn["content"][-1], "cache_control": _MARK}
