"""Anthropic's Messages API: the request's body, and what its answers mean."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from stepfleet.orchestrator.errors import ModelError
from stepfleet.orchestrator.models.endpoint import ROUTES, Endpoint
from stepfleet.orchestrator.models.failures import stated_failure
from stepfleet.orchestrator.models.media import Media, media_of
from stepfleet.orchestrator.models.pricing.prices import tier_of
from stepfleet.orchestrator.models.services import Api
from stepfleet.orchestrator.records.calls.tools import ToolSpec
from stepfleet.orchestrator.records.conversation.messages import (
    REASONING,
    Block,
    Content,
    Message,
    Role,
)
from stepfleet.orchestrator.records.responses import LLMResponse, ModelRequest, ModelSettings
from stepfleet.orchestrator.records.steps import FinishReason
from stepfleet.orchestrator.records.usage import UsageStats
from stepfleet.orchestrator.tools import parse_tool_calls
from stepfleet.worker.attempt.sanitize import new_call_id
from stepfleet.worker.models.bodies import (
    DONE,
    MOST_BLOCKS,
    MOST_REASONING,
    NO_NAME,
    WHOLE_TURN,
    alternating_turns,
    blocked,
    encode,
    is_strict,
    json_text,
    malformed,
    merged_usage,
    parse_body,
    parse_event,
    reasoning_block,
    reasoning_of,
    safe_name,
    shown_reasoning,
    usage_apart,
    with_reasoning,
    word,
)
from stepfleet.worker.models.http_model import Format
from stepfleet.worker.models.sent_back import SentBack, kept_of, model_at

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

    The service takes four marks in all, and none of an hour after a shorter one.
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


_THOUGHTS = ("thinking", "redacted_thinking")
_REASONS = {
    "end_turn": FinishReason.STOP,
    "stop_sequence": FinishReason.STOP,
    "tool_use": FinishReason.TOOL_CALLS,
    "max_tokens": FinishReason.LENGTH,
    "model_context_window_exceeded": FinishReason.LENGTH,
    "refusal": FinishReason.CONTENT_FILTER,
    "pause_turn": FinishReason.PAUSE,
}


def parse_message(payload: dict[str, Any], default_model: str) -> LLMResponse:
    """Return an answer as the fleet's; `default_model` names the model where it does not."""
    content = payload.get("content")
    if not isinstance(content, list) or not all(isinstance(one, dict) for one in content):
        raise malformed("its content is not a list of blocks")
    texts: list[str] = []
    uses: list[dict[str, Any]] = []
    reasoning: list[Block] = []
    thoughts: list[str] = []
    says = False  # a text that is sent back: the service takes none that is blank
    for block in content:
        kind = block.get("type")
        if kind in _THOUGHTS:
            thoughts.append(word(block.get("thinking")))
            if len(reasoning) < MOST_REASONING:
                reasoning.append(reasoning_block(PROVIDER, says + len(uses), block))
        elif kind == "text" and isinstance(block.get("text"), str):
            texts.append(block["text"])
            says = says or bool(block["text"].strip())
        elif kind == "tool_use":
            uses.append({**block, "arguments": block.get("input")})
    calls = parse_tool_calls(uses, new_id=new_call_id)
    reason = payload.get("stop_reason")
    known = _REASONS.get(reason, FinishReason.OTHER) if isinstance(reason, str) else None
    if calls and known in (None, FinishReason.STOP, FinishReason.PAUSE):
        known = FinishReason.TOOL_CALLS
    if known is FinishReason.PAUSE or uses_server_tools(content):
        is_over = known not in (FinishReason.PAUSE, FinishReason.TOOL_CALLS)
        reasoning = [*whole_turn(content, is_over=is_over)]
    if known is FinishReason.CONTENT_FILTER and not says:
        raise _refused(payload)
    model, usage = payload.get("model"), payload.get("usage")
    counted = usage if isinstance(usage, dict) else {}
    return LLMResponse.model_construct(
        content="".join(texts),
        tool_calls=calls or None,
        usage=usage_of(usage),
        model=model if isinstance(model, str) and model else default_model,
        service_tier=tier_of(counted.get("service_tier"), counted.get("speed")),
        finish_reason=known or FinishReason.OTHER,
        reasoning=(*reasoning, *kept_of({}, uses, model_at(PROVIDER, default_model))),
        reasoning_text=shown_reasoning(thoughts),
        raw=payload,
        unread=next((_UNREAD[one] for one in map(_kind, content) if one in _UNREAD), ""),
    )


def _kind(block: dict[str, Any]) -> str:
    return word(block.get("type"))


def _refused(payload: dict[str, Any]) -> ModelError:
    given = payload.get("stop_details")
    details = given if isinstance(given, dict) else {}
    category = word(details.get("category"))
    reason = f"stop reason refusal{category and ', category '}{category}"
    return blocked(reason, word(details.get("explanation")))


def usage_of(usage: Any) -> UsageStats | None:
    """Return the token counts of one call, or None when they are absent or no counts."""
    if not isinstance(usage, dict):
        return None
    details, writes = usage.get("output_tokens_details"), usage.get("cache_creation")
    return usage_apart(
        usage.get("input_tokens"),
        usage.get("output_tokens"),
        cached=usage.get("cache_read_input_tokens"),
        written=usage.get("cache_creation_input_tokens"),
        for_hour=writes.get("ephemeral_1h_input_tokens") if isinstance(writes, dict) else None,
        thought=details.get("thinking_tokens") if isinstance(details, dict) else None,
    )


_ENDINGS = ("stop_reason", "stop_sequence", "stop_details")
_BEHIND = 10**9
"""Where blocks stand whose index another one has: after all others."""
_MOST_COUNTS = 100
"""Fields of a usage that are kept: more than there are."""
_UNREAD = {"image": "an image", "document": "a document", "container_upload": "a file"}
_PIECES = {
    "text_delta": "text",
    "thinking_delta": "thinking",
    "signature_delta": "signature",
    "input_json_delta": "partial_json",
}
_BEGUN = {
    "text_delta": "text",
    "thinking_delta": "thinking",
    "input_json_delta": "tool_use",
}
"""The kind of a block by its first piece."""


class StreamedMessage:
    """The answer so far. `error` is the payload of a failure that came as an event."""

    def __init__(self) -> None:
        self.error: dict[str, Any] | None = None
        self.usage: dict[str, Any] | None = None
        self._size = 0
        self._done = False
        self._is_ended = False
        self._is_closed = False
        self._message: dict[str, Any] = {}
        self._given: dict[int, dict[str, Any]] = {}
        """The content of the message's start: some servers send it whole there."""
        self._blocks: dict[int, dict[str, Any]] = {}
        self._places: dict[int, int] = {}
        self._pieces: dict[tuple[int, str], list[str]] = {}
        self._citations: dict[int, list[Any]] = {}

    @property
    def size(self) -> int:
        """How many characters of text and calls it has."""
        return self._size

    @property
    def is_over(self) -> bool:
        """Whether nothing of interest follows."""
        return self._done or self._is_closed or self.error is not None

    @property
    def finished(self) -> bool:
        """Whether its own finish reason has come: then it is whole, whatever else may follow."""
        return self._done or self._is_ended

    def add(self, data: bytes) -> str:
        """Add one event and return the piece of text in it. Raises `ModelError` if malformed."""
        if data == DONE:  # chat's word for the end
            self._is_closed = True
            return ""
        event = parse_event(data)
        match event.get("type"):
            case "message_start":
                self._message = dict(_object(event.get("message")))
                self._given = _blocks_in(self._message)
                self._count(self._message.get("usage"))
            case "content_block_start":
                self._start(event.get("index"), _object(event.get("content_block")))
            case "content_block_delta":
                return self._delta(event.get("index"), _object(event.get("delta")))
            case "message_delta":
                delta = _object(event.get("delta"))
                self._message |= {
                    name: delta[name] for name in _ENDINGS if delta.get(name) is not None
                }
                self._is_ended = self._is_ended or bool(delta.get("stop_reason"))
                self._count(event.get("usage"))
            case "message_stop":
                self._done = True
            case "error":
                self.error = event
            case _:
                self.error = stated_failure(event, "type")
        return ""

    def payload(self) -> dict[str, Any]:
        """Return the whole answer. Raises `ModelError` when the stream broke off."""
        if not self.finished:
            raise malformed("the stream broke off")
        blocks = self._given | {index: self._whole(index) for index in self._blocks}
        content = [blocks[index] for index in sorted(blocks)]
        return {**self._message, "content": content, "usage": self.usage}

    def _count(self, usage: Any) -> None:
        # Counts are cumulative; the last event has only those that have changed, and some servers
        # have zeros there for those that the first one told.
        if isinstance(usage, dict) and len(self.usage or ()) < _MOST_COUNTS:
            self.usage = merged_usage(self.usage, usage)

    def _start(self, index: Any, block: dict[str, Any]) -> None:
        if not isinstance(index, int):
            raise malformed("a block of the stream has no index")
        place = self._places.get(index, index)
        known, name = self._blocks.get(place, {}).get("id"), block.get("id")
        if known and name and known != name:  # another call: some servers give all one index
            place = self._places[index] = _BEHIND + len(self._blocks)
        if len(self._blocks) < MOST_BLOCKS:
            self._blocks[place] = block

    def _delta(self, index: Any, delta: dict[str, Any]) -> str:
        kind = word(delta.get("type"))
        index = self._places.get(index, index) if isinstance(index, int) else index
        if isinstance(index, int) and index not in self._blocks and kind in _BEGUN:
            begun = {"type": _BEGUN[kind]}  # its start was left out
            given = self._given.get(index, begun)
            self._start(index, given if given.get("type") == _BEGUN[kind] else begun)
        if not isinstance(index, int) or index not in self._blocks:
            return ""
        if kind == "citations_delta":
            self._citations.setdefault(index, []).append(delta.get("citation"))
        field = _PIECES.get(kind, "")
        piece = delta.get(field)
        if not isinstance(piece, str):
            return ""
        self._pieces.setdefault((index, field), []).append(piece)
        if field == "signature":
            return ""
        self._size += len(piece)
        return piece if field == "text" else ""

    def _whole(self, index: int) -> dict[str, Any]:
        block = dict(self._blocks[index])
        for field in _PIECES.values():
            # Empty pieces are not arguments: those that the block began with stay.
            if text := "".join(self._pieces.get((index, field), ())):
                name = "input" if field == "partial_json" else field
                block[name] = text if name == "input" else word(block.get(name)) + text
        if block.get("type") != "tool_use" and isinstance(block.get("input"), str):
            block["input"] = parse_event(block["input"].encode())  # a call that the service made
        if index in self._citations:
            block["citations"] = self._citations[index]
        return block


def _blocks_in(message: dict[str, Any]) -> dict[int, dict[str, Any]]:
    content = message.get("content")
    listed = content[:MOST_BLOCKS] if isinstance(content, list) else []
    return {at: one for at, one in enumerate(listed) if isinstance(one, dict)}


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise malformed("an event of the stream lacks its object")
    return value


def _body(request: ModelRequest, _: Endpoint) -> bytes:
    return encode(request_body(request))


MESSAGES = Format(
    route=ROUTES[Api.MESSAGES],
    body=_body,
    parse=parse_body,
    stream=StreamedMessage,
    usage=usage_of,
    response=parse_message,
    failure=partial(stated_failure, answer="content"),
)
