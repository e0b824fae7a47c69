"""Puts a reply into the form of a chat completion, whole or as a stream of events. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from stepfleet.orchestrator.records import exact_json
from stepfleet.worker.testing.openai.conversation import call_id
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario.latency import name_of
from stepfleet.worker.testing.scenario.prompt_cache import Prompt, automatic
from stepfleet.worker.testing.scenario.replies import Reply, ToolCallReply, Usage

DONE = b"data: [DONE]\n\n"
_CREATED = 1_700_000_000
_CHARACTERS_PER_TOKEN = 4
_TOKENS_PER_MESSAGE = 4


@dataclass(frozen=True)
class Completion:
    """A reply with the place in a conversation that it answers."""

    reply: Reply
    request: RequestRecord

    @property
    def usage(self) -> Usage | None:
        """The token counts that are sent."""
        return self.reply.usage if self.reply.send_usage else None

    def body(self) -> dict[str, Any]:
        """Return the unstreamed completion."""
        message = {"role": "assistant", "content": self.reply.content, **self._extra()}
        if self.reply.tool_calls:
            message["tool_calls"] = [call for _, call in self._calls()]
        choice = {"index": 0, "message": message, "finish_reason": self.reply.ends_with}
        return self._envelope("chat.completion", [choice]) | self._usage()

    def events(self) -> list[bytes]:
        """Return the events of the stream, the closing `[DONE]` among them."""
        wants_usage = (self.request.body.get("stream_options") or {}).get("include_usage")
        nothing = {"usage": None} if wants_usage and self.reply.send_usage else {}
        events = [
            event(self._envelope("chat.completion.chunk", [choice]) | nothing)
            for choice in self._choices()
        ]
        if nothing:
            events.append(event(self._envelope("chat.completion.chunk", []) | self._usage()))
        return [*events, DONE]

    def _choices(self) -> Iterator[dict[str, Any]]:
        yield _choice({"role": "assistant", "content": "", **self._extra()})
        for piece in pieces_of(self.reply.content or "", self.reply.piece):
            yield _choice({"content": piece})
        for index, call in self._calls():
            function = call["function"]
            opening = {**call, "function": {**function, "arguments": ""}}
            yield _choice({"tool_calls": [{"index": index, **opening}]})
            for piece in pieces_of(function["arguments"], self.reply.piece):
                yield _choice({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
        yield _choice({}, self.reply.ends_with)

    def _calls(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for index, call in enumerate(self.reply.tool_calls):
            made = call_id(self.request.key, self.request.turn, index)
            identity = {} if call.omit_id else {"id": made if call.id is None else call.id}
            function = {"name": call.name, "arguments": arguments_text(call)}
            yield index, {**identity, "type": "function", "function": function}

    def _extra(self) -> dict[str, Any]:
        refused = {} if self.reply.refusal is None else {"refusal": self.reply.refusal}
        return {**refused, **self.reply.extra}

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{name_of(self.request.key, self.request.turn)}",
            "object": kind,
            "created": _CREATED + self.request.turn,
            "model": self.reply.model or self.request.body["model"],
            "choices": choices,
            **({"service_tier": tier} if (tier := self.reply.service_tier) else {}),
        }

    def _usage(self) -> dict[str, Any]:
        usage = self.usage
        if usage is None:
            return {}
        return {
            "usage": {
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.completion_tokens,
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
                "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
                "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            }
        }


def event(payload: Mapping[str, Any]) -> bytes:
    """Return a server-sent event."""
    return b"data: " + exact_json.dumps(payload) + b"\n\n"


def calls_of(request: RequestRecord, reply: Reply) -> Iterator[tuple[str, ToolCallReply, Any]]:
    """Yield id, call and arguments as data of the calls in a reply."""
    for index, call in enumerate(reply.tool_calls):
        made = call_id(request.key, request.turn, index) if call.id is None else call.id
        yield made, call, exact_json.loads(arguments_text(call))


def arguments_text(call: ToolCallReply) -> str:
    """Return the arguments as they are sent: text unchanged, a mapping as JSON."""
    if isinstance(call.arguments, str):
        return call.arguments
    return exact_json.text(call.arguments)


def estimate(prompt_tokens: int, reply: Reply) -> Usage:
    """Return about the tokens of a call; equal conversations and replies get equal counts."""
    answered = len(reply.content or "")
    answered += sum(len(call.name) + len(arguments_text(call)) for call in reply.tool_calls)
    return Usage(prompt_tokens, _TOKENS_PER_MESSAGE + answered // _CHARACTERS_PER_TOKEN)


def prompt_of(request: RequestRecord) -> Prompt:
    """Return the prompt as the service's cache sees it, which needs no marks."""
    body = request.body
    return automatic(request.model, exact_json.dumps([body.get("tools"), body.get("messages")]))


def _choice(delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "finish_reason": finish_reason}


def pieces_of(text: str, size: int) -> Iterator[str]:
    """Return the text in pieces of `size` characters."""
    return (text[start : start + size] for start in range(0, len(text), size))
