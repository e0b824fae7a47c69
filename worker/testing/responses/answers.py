"""Puts replies and faults into the answers of Responses. Refusals are those of chat completions."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from stepfleet.orchestrator.records import exact_json
from stepfleet.worker.testing.openai import answers as chat
from stepfleet.worker.testing.openai.completions import arguments_text, pieces_of
from stepfleet.worker.testing.openai.conversation import call_id
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.responses.conversation import call_item, conversation, encrypted
from stepfleet.worker.testing.scenario.faults import Fault, FaultKind
from stepfleet.worker.testing.scenario.latency import name_of
from stepfleet.worker.testing.scenario.replies import (
    JSON,
    Answer,
    Reply,
    Usage,
)
from stepfleet.worker.testing.wire import Wire

_CREATED = 1_700_000_000
_WHY = {"length": "max_output_tokens", "content_filter": "content_filter"}


def replying(request: RequestRecord, reply: Reply) -> Answer:
    """Return the answer that carries `reply`, streamed where the request wants it."""
    usage = reply.usage if reply.send_usage else None
    response = _Response(reply, request, usage)
    pieces = response.events() if request.streams else None
    return chat.carrying(reply, usage, pieces=pieces, body=response.body)


def failing(fault: Fault, sound: Answer) -> Answer:
    """Return the answer of a fault; `sound` is the one that the request would have got."""
    if fault.kind in (FaultKind.ERROR_EVENT, FaultKind.FAILED):
        return chat.delayed(fault, _failed(fault, sound))
    if fault.kind is FaultKind.CONTEXT_LENGTH_EXCEEDED:
        return chat.failing(replace(fault, message=fault.message or too_long(0, 0)), sound)
    if fault.kind not in (FaultKind.EMPTY_CHOICES, FaultKind.NO_MESSAGE):
        return chat.failing(fault, sound)
    body = exact_json.dumps({"id": "resp_empty", "object": "response", "status": "completed"})
    empty = replace(sound, pieces=(body,), length=len(body), usage=None, content_type=JSON)
    return chat.delayed(fault, empty)


def too_long(_tokens: int, _window: int) -> str:
    """Return why a prompt is refused: this service names no numbers."""
    return (
        "Your input exceeds the context window of this model. "
        "Please adjust your input and try again."
    )


def _failed(fault: Fault, sound: Answer) -> Answer:
    why = fault.message or "An error occurred while processing your request."
    error = {"code": "server_error", "message": why}
    response: dict[str, Any] = {
        "id": "resp_failed",
        "object": "response",
        "status": "failed",
        "error": error,
    }
    response |= {"output": [], "incomplete_details": None, "usage": None}
    if fault.kind is FaultKind.FAILED:
        last = _event("response.failed", response=response)
    else:
        last = _event("error", **error, param=None)
    return chat.with_error(sound, last, response)


WIRE = Wire(conversation, replying, chat.refusing, failing, too_long=too_long)


def _event(kind: str, **fields: Any) -> bytes:
    data = exact_json.dumps({"type": kind, "sequence_number": 0, **fields})
    return f"event: {kind}\ndata: ".encode() + data + b"\n\n"


@dataclass(frozen=True)
class _Response:
    """A reply with the place in a conversation that it answers."""

    reply: Reply
    request: RequestRecord
    usage: Usage | None

    def body(self) -> dict[str, Any]:
        return self._head([*self._items()], ended=True)

    def events(self) -> Iterator[bytes]:
        yield _event("response.created", response=self._head([], ended=False))
        for index, item in enumerate(self._items()):
            place = {"output_index": index, "item_id": item["id"]}
            yield _event("response.output_item.added", output_index=index, item=item)
            for piece in pieces_of(item.get("arguments", ""), self.reply.piece):
                yield _event("response.function_call_arguments.delta", delta=piece, **place)
            if item["type"] == "message":
                part = item["content"][0]
                for piece in pieces_of(part.get("text", part.get("refusal")), self.reply.piece):
                    more = {**place, "content_index": 0, "delta": piece, "logprobs": []}
                    yield _event(f"response.{part['type']}.delta", **more)
            yield _event("response.output_item.done", output_index=index, item=item)
        status = "incomplete" if self.reply.ends_with in _WHY else "completed"
        yield _event(f"response.{status}", response=self.body())

    def _head(self, output: list[dict[str, Any]], *, ended: bool) -> dict[str, Any]:
        why = _WHY.get(self.reply.ends_with)
        status = ("incomplete" if why else "completed") if ended else "in_progress"
        return {
            "id": f"resp_{name_of(self.request.key, self.request.turn)}",
            "object": "response",
            "created_at": _CREATED + self.request.turn,
            "status": status,
            "model": self.reply.model or self.request.body["model"],
            "output": output,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "error": None,
            "incomplete_details": {"reason": why} if why and ended else None,
            **({"service_tier": tier} if (tier := self.reply.service_tier) else {}),
            **({"usage": self._usage(self.usage)} if ended and self.usage else {}),
        }

    def _items(self) -> Iterator[dict[str, Any]]:
        name = name_of(self.request.key, self.request.turn)
        if self.reply.reasoning is not None:
            secret = encrypted(self.reply.reasoning)
            kind = {"type": "reasoning", "summary": [], "encrypted_content": secret}
            yield {"id": f"rs_{name}", **kind}
        text: dict[str, Any] = {"type": "refusal", "refusal": self.reply.refusal}
        if self.reply.refusal is None:
            text = {"type": "output_text", "text": self.reply.content, "annotations": []}
        if self.reply.content is not None or self.reply.refusal is not None:
            message = {"type": "message", "role": "assistant", "status": "completed"}
            yield {"id": f"msg_{name}", **message, "content": [text]}
        for index, call in enumerate(self.reply.tool_calls):
            made = call_id(self.request.key, self.request.turn, index)
            yield {
                "id": call_item(name, index, thought=self.reply.reasoning is not None),
                "type": "function_call",
                "call_id": made if call.id is None else call.id,
                "name": call.name,
                "arguments": arguments_text(call),
                "status": "completed",
            }

    @staticmethod
    def _usage(usage: Usage) -> dict[str, Any]:
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.cached_tokens,
                "cache_write_tokens": usage.cache_write_tokens,
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
