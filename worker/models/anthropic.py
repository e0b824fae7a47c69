"""Anthropic's Messages: requests, answers and streams. Pure.

Follows the types of the official SDK, `anthropic` 2.12 (API version 2026-10-21).
"""

from collections.abc import Iterable, Iterator
from typing import Any

import orjson

from stepfleet.orchestrator.records.messages import REASONING, Block, Content, Message, Role
from stepfleet.orchestrator.records.responses import LLMResponse, ModelRequest, ModelSettings
from stepfleet.orchestrator.records.steps import FinishReason
from stepfleet.orchestrator.records.usage import UsageStats, token_count
from stepfleet.orchestrator.tools import parse_tool_calls
from stepfleet.orchestrator.tools.calls import MOST_CALLS
from stepfleet.worker.attempt.sanitize import new_call_id
from stepfleet.worker.models.bodies import (
    NO_NAME,
    encode,
    malformed,
    media_of,
    parse_body,
    reasoning_block,
    reasoning_of,
    safe_name,
    with_reasoning,
)
from stepfleet.worker.models.endpoint import Endpoint
from stepfleet.worker.models.http_model import Format
from stepfleet.worker.models.lenient_json import read_json

PROVIDER = "anthropic"
MOST_TOKENS = 8192
"""Tokens of an answer where `settings.max_tokens` is not set: the service wants a number."""

_CHOICES = {"auto": "auto", "any": "any", "none": "none"}
_MARK = {"type": "ephemeral"}
_THOUGHTS = ("thinking", "redacted_thinking")
_REASONS = {
    "end_turn": FinishReason.STOP,
    "stop_sequence": FinishReason.STOP,
    "tool_use": FinishReason.TOOL_CALLS,
    "max_tokens": FinishReason.LENGTH,
    "model_context_window_exceeded": FinishReason.LENGTH,
    "refusal": FinishReason.CONTENT_FILTER,
}

# ------------------------------------------------------------------------------------- requests


def request_body(request: ModelRequest) -> dict[str, Any]:
    """Return the body of `request`. `extra_body` is merged last and may overrule every field."""
    settings = request.settings
    system = [_text(one.text) for one in request.messages if one.is_system() and one.text]
    messages = _turns(one for one in request.messages if not one.is_system())
    body: dict[str, Any] = {
        "model": request.model,
        "max_tokens": _most_tokens(settings),
        "messages": messages,
    }
    tools = [_tool(spec.name, spec.description, spec.parameters) for spec in request.tools]
    if settings.prompt_cache:
        _mark(tools, system, messages)
    if system:
        body["system"] = system
    if tools:
        body["tools"] = tools
        body["tool_choice"] = _tool_choice(request)
    output = _output(request)
    if output:
        body["output_config"] = output
    return body | _sampling(settings) | settings.extra_body


def _most_tokens(settings: ModelSettings) -> int:
    return settings.max_tokens or MOST_TOKENS + (settings.reasoning_budget or 0)


def _sampling(settings: ModelSettings) -> dict[str, Any]:
    thinking: dict[str, Any] | None = None
    if settings.reasoning_budget:
        thinking = {"type": "enabled", "budget_tokens": settings.reasoning_budget}
    elif settings.reasoning_budget == 0 or settings.reasoning_effort == "none":
        thinking = {"type": "disabled"}
    elif settings.reasoning_effort:
        thinking = {"type": "adaptive"}
    fields = {
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "stop_sequences": list(settings.stop) or None,
        "service_tier": settings.service_tier,
        "stream": settings.stream or None,
        "thinking": thinking,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _output(request: ModelRequest) -> dict[str, Any]:
    output: dict[str, Any] = {}
    if request.output and request.output.json_schema is not None:
        output["format"] = {"type": "json_schema", "schema": request.output.json_schema}
    effort = request.settings.reasoning_effort
    if effort and effort != "none" and not request.settings.reasoning_budget:
        output["effort"] = "low" if effort == "minimal" else effort
    return output


def _tool(name: str, description: str, parameters: dict[str, Any]) -> dict[str, Any]:
    schema = parameters or {"type": "object", "properties": {}}
    tool: dict[str, Any] = {"name": name, "input_schema": schema}
    return tool | {"description": description} if description else tool


def _tool_choice(request: ModelRequest) -> dict[str, Any]:
    kind = _CHOICES.get(request.tool_choice)
    choice: dict[str, Any] = {"type": kind} if kind else {"type": "tool"}
    if kind is None:
        choice["name"] = request.tool_choice
    if request.parallel_tool_calls is False and kind != "none":
        choice["disable_parallel_tool_use"] = True
    return choice


def _turns(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """Return alternating turns: all results of one answer, and what follows them, are one."""
    turns: list[dict[str, Any]] = []
    for message in messages:
        role = "assistant" if message.role is Role.ASSISTANT else "user"
        blocks = list(_blocks(message))
        if not blocks:
            continue
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] += blocks
        else:
            turns.append({"role": role, "content": blocks})
    return turns


def _blocks(message: Message) -> Iterator[dict[str, Any]]:
    if message.role is Role.TOOL:
        yield _result(message.tool_call_id or "", message.content, status=None)
        return
    if message.role is not Role.ASSISTANT:
        yield from _parts(message.content)
        return
    items = list(_parts(message.content))
    items += [_use(one.id, one.name, one.arguments) for one in message.tool_calls]
    yield from with_reasoning(items, reasoning_of(message, PROVIDER))


def _parts(content: Content) -> Iterator[dict[str, Any]]:
    if isinstance(content, str):
        content = [{"text": content}] if content else []
    for block in content:
        if REASONING not in block and block.get("text") != "":
            yield _part(block)


def _part(block: Block) -> dict[str, Any]:
    """Return one block in the service's form; kinds unknown here pass unchanged."""
    if "type" in block:
        return block
    if "text" in block:
        return _text(str(block["text"]))
    if "json" in block:
        return _text(orjson.dumps(block["json"]).decode())
    if "toolUse" in block:
        used = block["toolUse"]
        return _use(used["toolUseId"], used["name"], used.get("input", {}))
    if "toolResult" in block:
        given = block["toolResult"]
        return _result(given["toolUseId"], given.get("content", ""), status=given.get("status"))
    return _media(block)


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _use(call_id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    # The service takes only some characters in an id, and other providers' ids have more.
    return {
        "type": "tool_use",
        "id": safe_name(call_id),
        "name": safe_name(name) or NO_NAME,
        "input": arguments,
    }


def _result(call_id: str, content: Content, *, status: str | None) -> dict[str, Any]:
    result: dict[str, Any] = {"type": "tool_result", "tool_use_id": safe_name(call_id)}
    if content:
        result["content"] = content if isinstance(content, str) else list(_parts(content))
    return result | {"is_error": True} if status == "error" else result


def _media(block: Block) -> dict[str, Any]:
    media = media_of(block)
    if media is None:
        return block
    if "image" in block:
        return {"type": "image", "source": _source(media.media_type, media.data, media.url)}
    if media.media_type.startswith("text/") and "text" in block["document"].get("source", {}):
        text = str(block["document"]["source"]["text"])
        source = {"type": "text", "media_type": "text/plain", "data": text}
    else:
        source = _source(media.media_type, media.data, media.url)
    return {"type": "document", "source": source, "title": media.name}


def _source(media_type: str, data: str, url: str) -> dict[str, Any]:
    if url:
        return {"type": "url", "url": url}
    return {"type": "base64", "media_type": media_type, "data": data}


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


# -------------------------------------------------------------------------------------- answers


def parse_message(payload: dict[str, Any], default_model: str) -> LLMResponse:
    """Return an answer as the fleet's; `default_model` names the model where it does not."""
    content = payload.get("content")
    if not isinstance(content, list) or not all(isinstance(one, dict) for one in content):
        raise malformed("its content is not a list of blocks")
    texts: list[str] = []
    uses: list[dict[str, Any]] = []
    reasoning: list[Block] = []
    for block in content:
        kind = block.get("type")
        if kind in _THOUGHTS:
            reasoning.append(reasoning_block(PROVIDER, bool(texts) + len(uses), block))
        elif kind == "text" and isinstance(block.get("text"), str):
            texts.append(block["text"])
        elif kind == "tool_use":
            uses.append({**block, "arguments": block.get("input")})
    calls = parse_tool_calls(uses, new_id=new_call_id)
    reason = payload.get("stop_reason")
    known = _REASONS.get(reason, FinishReason.OTHER) if isinstance(reason, str) else None
    if calls and known in (None, FinishReason.STOP):
        known = FinishReason.TOOL_CALLS
    model = payload.get("model")
    return LLMResponse.model_construct(
        content="".join(texts) or _refusal_of(payload),
        tool_calls=calls or None,
        usage=usage_of(payload.get("usage")),
        model=model if isinstance(model, str) and model else default_model,
        finish_reason=known or FinishReason.OTHER,
        reasoning=tuple(reasoning),
        raw=payload,
    )


def _refusal_of(payload: dict[str, Any]) -> str:
    details = payload.get("stop_details")
    explanation = details.get("explanation") if isinstance(details, dict) else None
    return explanation if isinstance(explanation, str) else ""


def usage_of(usage: Any) -> UsageStats | None:
    """Return the token counts of one call, or None when they are absent or no counts.

    The service counts tokens that were read from or written to its prompt cache apart.
    """
    if not isinstance(usage, dict):
        return None
    given, completion = (
        token_count(usage.get("input_tokens")),
        token_count(usage.get("output_tokens")),
    )
    if given is None or completion is None:
        return None
    cached = token_count(usage.get("cache_read_input_tokens")) or 0
    written = token_count(usage.get("cache_creation_input_tokens")) or 0
    details = usage.get("output_tokens_details")
    thought = token_count(details.get("thinking_tokens")) if isinstance(details, dict) else 0
    prompt = given + cached + written
    return UsageStats.model_construct(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        llm_calls=1,
        cached_tokens=cached,
        cache_write_tokens=written,
        reasoning_tokens=thought or 0,
    )


# -------------------------------------------------------------------------------------- streams

_PIECES = {
    "text_delta": "text",
    "thinking_delta": "thinking",
    "signature_delta": "signature",
    "input_json_delta": "partial_json",
}


class StreamedMessage:
    """The answer so far. `error` is the payload of a failure that came as an event."""

    def __init__(self) -> None:
        self.error: dict[str, Any] | None = None
        self.usage: dict[str, Any] | None = None
        self._size = 0
        self._done = False
        self._message: dict[str, Any] = {}
        self._blocks: dict[int, dict[str, Any]] = {}
        self._pieces: dict[tuple[int, str], list[str]] = {}

    @property
    def size(self) -> int:
        """How many characters of text and calls it has."""
        return self._size

    @property
    def is_over(self) -> bool:
        """Whether nothing of interest follows."""
        return self._done or self.error is not None

    def add(self, data: bytes) -> str:
        """Add one event and return the piece of text in it. Raises `ModelError` if malformed."""
        try:
            event = read_json(data)
        except orjson.JSONDecodeError:
            raise malformed("an event of the stream is not JSON") from None
        if not isinstance(event, dict):
            raise malformed("an event of the stream is not a JSON object")
        match event.get("type"):
            case "message_start":
                self._message = _object(event.get("message"))
                self._count(self._message.get("usage"))
            case "content_block_start":
                self._start(event.get("index"), _object(event.get("content_block")))
            case "content_block_delta":
                return self._delta(event.get("index"), _object(event.get("delta")))
            case "message_delta":
                self._message |= _object(event.get("delta"))
                self._count(event.get("usage"))
            case "message_stop":
                self._done = True
            case "error":
                self.error = event
        return ""

    def payload(self) -> dict[str, Any]:
        """Return the whole answer. Raises `ModelError` when the stream broke off."""
        if not self._done:
            raise malformed("the stream broke off")
        content = [self._whole(index) for index in sorted(self._blocks)]
        return {**self._message, "content": content, "usage": self.usage}

    def _count(self, usage: Any) -> None:
        # Counts are cumulative; the last event has only those that have changed.
        if isinstance(usage, dict):
            known = {name: value for name, value in usage.items() if value is not None}
            self.usage = {**(self.usage or {}), **known}

    def _start(self, index: Any, block: dict[str, Any]) -> None:
        if not isinstance(index, int):
            raise malformed("a block of the stream has no index")
        if len(self._blocks) <= 2 * MOST_CALLS:
            self._blocks[index] = block

    def _delta(self, index: Any, delta: dict[str, Any]) -> str:
        field = _PIECES.get(str(delta.get("type")), "")
        piece = delta.get(field)
        if index not in self._blocks or not isinstance(piece, str):
            return ""
        self._pieces.setdefault((index, field), []).append(piece)
        if field == "signature":
            return ""
        self._size += len(piece)
        return piece if field == "text" else ""

    def _whole(self, index: int) -> dict[str, Any]:
        block = dict(self._blocks[index])
        for field in _PIECES.values():
            if pieces := self._pieces.get((index, field)):
                text = "".join(pieces)
                name = "input" if field == "partial_json" else field
                block[name] = text if name == "input" else str(block.get(name) or "") + text
        return block


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise malformed("an event of the stream lacks its object")
    return value


def _body(request: ModelRequest, _: Endpoint) -> bytes:
    return encode(request_body(request))


MESSAGES = Format(
    path="/v1/messages",
    body=_body,
    parse=parse_body,
    stream=StreamedMessage,
    usage=usage_of,
    response=parse_message,
    failed=lambda payload: payload.get("type") == "error",
    headers={"anthropic-version": "2026-10-21"},
)
