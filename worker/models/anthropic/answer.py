"""Reads answers of Messages, whole or streamed, into `LLMResponse`s. Pure."""

from typing import Any

from stepfleet.orchestrator.errors import ModelError
from stepfleet.orchestrator.models.failures import stated_failure
from stepfleet.orchestrator.models.pricing.tiers import tier_of
from stepfleet.orchestrator.records.conversation.messages import Block
from stepfleet.orchestrator.records.responses import LLMResponse
from stepfleet.orchestrator.records.steps import FinishReason
from stepfleet.orchestrator.records.usage import UsageStats
from stepfleet.orchestrator.tools import parse_tool_calls
from stepfleet.worker.attempt.sanitize import new_call_id
from stepfleet.worker.models.anthropic.request import PROVIDER, uses_server_tools, whole_turn
from stepfleet.worker.models.bodies import (
    DONE,
    MOST_BLOCKS,
    MOST_REASONING,
    blocked,
    malformed,
    merged_usage,
    parse_event,
    reasoning_block,
    shown_reasoning,
    usage_apart,
    word,
)
from stepfleet.worker.models.sent_back import kept_of, model_at

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
"""Where blocks stand whose index another one has: behind all others."""
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
            # Empty pieces are no arguments: those that the block began with stay.
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
