"""Anthropic's Messages: requests as they arrive, answers as they are sent."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from typing import Any

from stepfleet.orchestrator.records import exact_json
from stepfleet.worker.testing.openai import answers as chat
from stepfleet.worker.testing.openai.answers import calls_of, pieces_of
from stepfleet.worker.testing.openai.conversation import Violation
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.rate_limits import RateStanding
from stepfleet.worker.testing.scenario import (
    JSON,
    REFUSED,
    Fault,
    FaultKind,
    HttpAnswer,
    Reply,
    Tagged,
    Usage,
    marked,
    name_of,
)
from stepfleet.worker.testing.wire import PLAIN_ID, MisfitError, Wire, fit, fit_id

_SOURCE = {"type": str, "data?": str, "url?": str, "media_type?": str}
_RESULT: dict[str, dict[str, Any]] = {
    "text": {"text": str},
    "image": {"source": _SOURCE},
    "document": {"source": _SOURCE, "title?": str},
    "search_result": {},
}
_BLOCK = Tagged({
    **_RESULT,
    "tool_use": {"id": str, "name": str, "input": dict},
    "tool_result": {"tool_use_id": str, "content?": (str, [Tagged(_RESULT)]), "is_error?": bool},
    "thinking": {"thinking": str, "signature": str},
    "redacted_thinking": {"data": str},
})  # fmt: skip
_SHAPE: dict[str, Any] = {
    "model": str,
    "max_tokens": int,
    "messages": [{"role": frozenset({"user", "assistant"}), "content": (str, [_BLOCK])}],
    "system?": (str, [Tagged({"text": {"text": str}})]),
    "tools?": [{"name": str, "input_schema": dict, "description?": str, "strict?": bool}],
    "tool_choice?": {
        "type": frozenset({"auto", "any", "none", "tool"}), "name?": str,
        "disable_parallel_tool_use?": bool,
    },
    "thinking?": {"type": frozenset({"enabled", "adaptive", "disabled"}), "budget_tokens?": int},
    "stream?": bool,
    "stop_sequences?": [str],
    "service_tier?": str,
    "top_k?": int,
    **dict.fromkeys(("temperature?", "top_p?"), float),
    **dict.fromkeys(("output_config?", "metadata?", "cache_control?"), dict),
}  # fmt: skip
_THOUGHTS = {"thinking", "redacted_thinking"}
_MOST_MARKS = 4
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_LEAST_BUDGET = 1024
_OF_MESSAGES = ("tool_choice", "thinking")


def conversation(body: dict[str, Any], _path: str) -> dict[str, Any]:
    """Return the request as one of chat completions. Raises `MisfitError`."""
    _check(body)
    messages = [{"role": "system", "content": _text(body["system"])}] if body.get("system") else []
    for number, turn in enumerate(body["messages"]):
        messages += _messages(turn, f"messages.{number}")
    if (marks := sum(mark for _, mark in marked_blocks(body))) > _MOST_MARKS:
        why = f"A maximum of 4 blocks with cache_control may be provided. Found {marks}."
        raise MisfitError("cache_control", why)
    chat: dict[str, Any] = {"model": body["model"], "messages": messages}
    if body.get("tools"):
        chat["tools"] = [_tool(tool) for tool in body["tools"]]
        chat["tool_choice"] = _choice(body.get("tool_choice") or {"type": "auto"})
    if body.get("stream"):
        chat |= {"stream": True, "stream_options": {"include_usage": True}}
    return chat


def marked_blocks(body: Mapping[str, Any]) -> list[tuple[bytes, bool]]:
    """Return the blocks of a prompt in order, each with whether it is marked for the cache.

    A mark of the whole request is one of its last block. How the model chooses tools and thinks
    belongs to the messages: they are not found again after a change of it.
    """
    blocks = [*(body.get("tools") or []), *_blocks(body.get("system") or "")]
    fixed = len(blocks)
    for turn in body["messages"]:
        blocks += ({"role": turn["role"], **block} for block in _blocks(turn["content"]))
    blocks[fixed] = {**blocks[fixed], **{name: body.get(name) for name in _OF_MESSAGES}}
    if mark := body.get("cache_control"):
        blocks[-1] = {**blocks[-1], "cache_control": mark}
    return [
        (
            exact_json.dumps({name: one for name, one in block.items() if name != "cache_control"}),
            bool(block.get("cache_control")),
        )
        for block in blocks
    ]


def _check(body: dict[str, Any]) -> None:
    fit(body, _SHAPE, index=".{}", unknown="Extra inputs are not permitted")
    if body["max_tokens"] < 1:
        raise MisfitError("max_tokens", "Input should be greater than or equal to 1")
    if not body["messages"]:
        raise MisfitError("messages", "at least one message is required")
    thinking = body.get("thinking") or {}
    budget = thinking.get("budget_tokens") or 0
    if thinking.get("type") == "enabled" and not _LEAST_BUDGET <= budget < body["max_tokens"]:
        why = "must be at least 1024 and less than `max_tokens`"
        raise MisfitError("thinking.budget_tokens", why)
    _check_results(body["messages"])
    if thinking.get("type") == "enabled":
        _check_thought(body["messages"])


def _check_results(turns: list[dict[str, Any]]) -> None:
    """Check that all calls of a turn are answered in the next one, and nothing else is."""
    used: list[str] = []
    for number, turn in enumerate([*turns, {"role": "user", "content": []}]):
        blocks, place = _blocks(turn["content"]), f"messages.{number}"
        results = [one["tool_use_id"] for one in blocks if one["type"] == "tool_result"]
        if other := [one for one in results if one not in used]:
            raise MisfitError(place, f"unexpected `tool_use_id` found in `tool_result` blocks: "
                f"{other[0]}. Each `tool_result` block must have a corresponding `tool_use` block "
                "in the previous message.")  # fmt: skip
        if missing := [one for one in used if one not in results]:
            raise MisfitError(place, "`tool_use` ids were found without `tool_result` blocks "
                f"immediately after: {', '.join(missing)}.")  # fmt: skip
        used = [one["id"] for one in blocks if one["type"] == "tool_use"]


def _check_thought(turns: list[dict[str, Any]]) -> None:
    """Check that the answer whose calls have just been answered begins with thinking."""
    *_, question, answered = ({"content": ""}, *turns)
    kind = next((one["type"] for one in _blocks(question["content"])), "text")
    is_loop = any(one["type"] == "tool_result" for one in _blocks(answered["content"]))
    if is_loop and kind not in _THOUGHTS:
        raise MisfitError(
            f"messages.{len(turns) - 2}.content.0.type",
            f"Expected `thinking` or `redacted_thinking`, but found `{kind}`. When `thinking` is "
            "enabled, a final `assistant` message must start with a thinking block",
        )


def _messages(turn: dict[str, Any], place: str) -> Iterator[dict[str, Any]]:
    role, blocks = turn["role"], _blocks(turn["content"])
    if not blocks:
        raise MisfitError(f"{place}.content", "must not be empty")
    for number, block in enumerate(blocks):
        if block["type"] == "text" and not block["text"].strip():
            raise MisfitError(f"{place}.content.{number}", "text content blocks must be non-empty")
        if block["type"] == "tool_use" and role == "user":
            raise MisfitError(f"{place}.content.{number}", "`tool_use` blocks are of the assistant")
    if role == "assistant":
        yield _assistant(blocks, place)
        return
    results = [block for block in blocks if block["type"] == "tool_result"]
    if results and blocks[: len(results)] != results:
        raise MisfitError(place, "tool_result blocks come first in a user message")
    for block in results:
        text = _text(block.get("content") or "")
        yield {"role": "tool", "tool_call_id": block["tool_use_id"], "content": text}
    if rest := blocks[len(results) :]:
        texts = all(block["type"] == "text" for block in rest)
        yield {"role": "user", "content": _text(rest) if texts else rest}


def _assistant(blocks: list[dict[str, Any]], place: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": _text(blocks) or None}
    calls: list[dict[str, Any]] = []
    for number, block in enumerate(blocks):
        where = f"{place}.content.{number}"
        if block["type"] == "thinking" and block["signature"] != signature(block):
            raise MisfitError(where, "Invalid `signature` in `thinking` block")
        if block["type"] in _THOUGHTS and calls:
            why = "`thinking` or `redacted_thinking` blocks cannot be modified or moved after calls"
            raise MisfitError(where, why)
        if block["type"] == "tool_use":
            fit_id(block["id"], PLAIN_ID, f"{where}.tool_use.id")
            arguments = exact_json.text(block["input"])
            function = {"name": block["name"], "arguments": arguments}
            calls.append({"id": block["id"], "type": "function", "function": function})
    if blocks[-1]["type"] in _THOUGHTS:
        raise MisfitError(place, "The final block in an assistant message cannot be `thinking`.")
    if calls:
        message["tool_calls"] = calls
    return message


def signature(block: dict[str, Any]) -> str:
    """Return the signature that the server gives a block of thinking."""
    return f"signed-{name_of(block['thinking'])}"


def _blocks(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _text(content: str | list[dict[str, Any]]) -> str:
    return "".join(one["text"] for one in _blocks(content) if one["type"] == "text")


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = {"name": tool["name"], "parameters": tool["input_schema"]}
    return {"type": "function", "function": function}


def _choice(choice: dict[str, Any]) -> Any:
    if choice["type"] == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return _CHOICES[choice["type"]]


PATH = "/v1/messages"
_OVERLOADED = 529


def too_long(tokens: int, window: int) -> str:
    """Return why a prompt of that many tokens is refused."""
    return f"prompt is too long: {tokens} tokens > {window} maximum"


_REASONS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens",
            "content_filter": "refusal"}  # fmt: skip
_REFUSALS: dict[FaultKind | str, tuple[int, str, str]] = {
    FaultKind.RATE_LIMITED: (
        HTTPStatus.TOO_MANY_REQUESTS, "rate_limit_error", "This request would exceed your limit"),
    FaultKind.SERVER_ERROR: (
        HTTPStatus.INTERNAL_SERVER_ERROR, "api_error", "Internal server error"),
    FaultKind.OVERLOADED: (_OVERLOADED, "overloaded_error", "Overloaded"),
    FaultKind.CONTEXT_LENGTH_EXCEEDED: (
        HTTPStatus.BAD_REQUEST, "invalid_request_error",
        too_long(208_310, 200_000)),
    FaultKind.CONTENT_FILTER: (
        HTTPStatus.BAD_REQUEST, "invalid_request_error",
        "Output blocked by content filtering policy"),
    FaultKind.UNAUTHORIZED: (
        HTTPStatus.UNAUTHORIZED, "authentication_error", "invalid x-api-key"),
    FaultKind.FORBIDDEN: (
        HTTPStatus.FORBIDDEN, "permission_error", "The key may not use this model"),
    FaultKind.NOT_FOUND: (HTTPStatus.NOT_FOUND, "not_found_error", "model: unknown"),
}  # fmt: skip


def replying(request: RequestRecord, reply: Reply) -> HttpAnswer:
    """Return the answer that carries `reply`, streamed where the request wants it."""
    usage = reply.usage if reply.send_usage else None
    message = _Message(reply, request, usage)
    pieces = message.events() if request.streams else None
    return chat.carrying(reply, usage, pieces=pieces, body=message.body)


def refusing(violation: Violation) -> HttpAnswer:
    """Return the 400 that names what is wrong with the request."""
    answer = _error(REFUSED, HTTPStatus.BAD_REQUEST, "invalid_request_error", str(violation))
    return replace(answer, delay=0.0)


def failing(fault: Fault, sound: HttpAnswer) -> HttpAnswer:
    """Return the answer of a fault; `sound` is the one that the request would have got."""
    if fault.kind in _REFUSALS:
        status, kind, message = _REFUSALS[fault.kind]
        sound = replace(sound, pieces=())
        failed = _error(str(fault.kind), status, kind, fault.message or message)
    elif fault.kind in (FaultKind.EMPTY_CHOICES, FaultKind.NO_MESSAGE):
        body = exact_json.dumps({"id": "msg_empty", "type": "message", "role": "assistant"})
        failed = replace(sound, pieces=(body,), length=len(body), usage=None)
        failed = replace(failed, content_type=JSON)
    elif fault.kind in (FaultKind.ERROR_EVENT, FaultKind.FAILED):
        error = {"type": "overloaded_error", "message": fault.message or "Overloaded"}
        body_of = {"type": "error", "error": error, "request_id": "req_1"}
        failed = chat.with_error(sound, _event("error", error=error), body_of)
    else:
        return chat.failing(fault, sound)
    return chat.delayed(fault, failed)


def limit_headers(standings: Mapping[str, RateStanding], _wait: float | None) -> dict[str, str]:
    """Return the headers that show how a key stands to its limits."""
    headers: dict[str, str] = {}
    for kind, standing in standings.items():
        name = f"anthropic-ratelimit-{kind.replace('_', '-')}"
        moment = datetime.now(UTC) + timedelta(seconds=standing.reset)
        headers[f"{name}-limit"] = f"{standing.limit:.0f}"
        headers[f"{name}-remaining"] = f"{int(standing.remaining)}"
        headers[f"{name}-reset"] = moment.isoformat(timespec="seconds").replace("+00:00", "Z")
    return headers


WIRE = Wire(
    conversation,
    replying,
    refusing,
    failing,
    prompt=lambda request: marked(request.model, marked_blocks(request.sent)),
    too_long=too_long,
    limit_headers=limit_headers,
    free_reads=True,
    id_header="request-id",
)


@dataclass(frozen=True)
class _Message:
    """A reply with the place in a conversation that it answers."""

    reply: Reply
    request: RequestRecord
    usage: Usage | None

    def body(self) -> dict[str, Any]:
        return self._head() | {
            "content": [*self._blocks()],
            **self._stop(),
            **({"usage": self._usage()} if self.usage else {}),
        }

    def events(self) -> Iterator[bytes]:
        usage = {"usage": {**self._usage(), "output_tokens": 1}} if self.usage else {}
        head = self._head() | {"content": [], "stop_reason": None} | usage
        yield _event("message_start", message=head)
        yield _event("ping")
        for index, block in enumerate(self._blocks()):
            yield from self._block(index, block)
        yield _event(
            "message_delta",
            delta={**self._stop(), "stop_sequence": None},
            **({"usage": {"output_tokens": self._usage()["output_tokens"]}} if self.usage else {}),
        )
        yield _event("message_stop")

    def _block(self, index: int, block: dict[str, Any]) -> Iterator[bytes]:
        kind = block["type"]
        name = {"tool_use": "input"}.get(kind, kind)
        whole = exact_json.text(block[name]) if kind == "tool_use" else block[name]
        signed = {"signature": ""} if kind == "thinking" else {}
        empty: dict[str, Any] = {**block, **signed, name: {} if kind == "tool_use" else ""}
        yield _event("content_block_start", index=index, content_block=empty)
        delta = {"tool_use": "input_json_delta"}.get(kind, f"{kind}_delta")
        part = "partial_json" if kind == "tool_use" else name
        for piece in pieces_of(whole, self.reply.piece):
            change = {"type": delta, part: piece}
            yield _event("content_block_delta", index=index, delta=change)
        if signed:
            change = {"type": "signature_delta", "signature": block["signature"]}
            yield _event("content_block_delta", index=index, delta=change)
        yield _event("content_block_stop", index=index)

    def _stop(self) -> dict[str, Any]:
        if (why := self.reply.refusal) is not None:
            details = {"type": "refusal", "category": None, "explanation": why}
            return {"stop_reason": "refusal", "stop_details": details}
        return {"stop_reason": _REASONS.get(self.reply.ends_with, self.reply.ends_with)}

    def _head(self) -> dict[str, Any]:
        return {
            "id": f"msg_{name_of(self.request.key, self.request.turn)}",
            "type": "message",
            "role": "assistant",
            "model": self.reply.model or self.request.body["model"],
            "stop_sequence": None,
        }

    def _blocks(self) -> Iterator[dict[str, Any]]:
        if self.reply.reasoning is not None:
            block = {"type": "thinking", "thinking": self.reply.reasoning}
            yield {**block, "signature": signature(block)}
        if self.reply.content:
            yield {"type": "text", "text": self.reply.content}
        for identity, call, arguments in calls_of(self.request, self.reply):
            yield {"type": "tool_use", "id": identity, "name": call.name, "input": arguments}

    def _usage(self) -> dict[str, Any]:
        usage = self.usage or Usage(0, 0)
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens - usage.cache_write_tokens,
            "cache_read_input_tokens": usage.cached_tokens,
            "cache_creation_input_tokens": usage.cache_write_tokens,
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
            "service_tier": self.reply.service_tier or "standard",
        }


def _event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: ".encode() + exact_json.dumps({"type": kind, **fields}) + b"\n\n"


def _error(outcome: str, status: int, kind: str, message: str) -> HttpAnswer:
    error = {"type": "error", "error": {"type": kind, "message": message}, "request_id": "req_1"}
    body = exact_json.dumps(error)
    return HttpAnswer(outcome, status, (body,), length=len(body))
