"""OpenAI's Responses: requests as they arrive, answers as they are sent. Pure."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from stepfleet.orchestrator.records import exact_json
from stepfleet.worker.testing.openai import answers as chat
from stepfleet.worker.testing.openai.answers import arguments_text, pieces_of
from stepfleet.worker.testing.openai.conversation import call_id
from stepfleet.worker.testing.openai.requests import RequestRecord
from stepfleet.worker.testing.scenario import (
    JSON,
    Fault,
    FaultKind,
    HttpAnswer,
    Reply,
    Tagged,
    Usage,
    name_of,
)
from stepfleet.worker.testing.wire import MisfitError, Wire, fit, fit_id

PATH = "/v1/responses"
_ID = re.compile(r".{1,64}")
_PARTS = {"input_text": "text", "input_image": "image_url", "input_file": "file"}
_PART = Tagged({
    "input_text": {"text": str},
    "input_image": {"image_url?": str, "file_id?": str, "detail?": str},
    "input_file": {"filename?": str, "file_data?": str, "file_url?": str, "file_id?": str},
    "output_text": {"text": str},
    "refusal": {"refusal": str},
})  # fmt: skip
_ROLES = frozenset({"user", "assistant", "system", "developer"})
_ITEM = Tagged({
    "message": {"role": _ROLES, "content": (str, [_PART]), "id?": str},
    "function_call": {"call_id": str, "name": str, "arguments": str, "id?": str},
    "function_call_output": {"call_id": str, "output": (str, [_PART])},
    "reasoning": {"id": str, "summary": [dict], "encrypted_content?": str},
}, usual="message")  # fmt: skip
_TOOL = {"name": str, "strict": bool, "parameters": dict, "description?": str}
_FORMAT = Tagged({
    "text": {}, "json_object": {}, "json_schema": {"name": str, "schema": dict, "strict?": bool},
})  # fmt: skip
_SHAPE: dict[str, Any] = {
    "model": str,
    "input": (str, [_ITEM]),
    "tools?": [Tagged({"function": _TOOL})],
    "tool_choice?": (frozenset({"auto", "none", "required"}), Tagged({"function": {"name": str}})),
    "text?": {"format?": _FORMAT},
    "reasoning?": {"effort?": str, "summary?": str},
    "include?": [str],
    "max_output_tokens?": int,
    "metadata?": dict,
    **dict.fromkeys(("store?", "stream?", "parallel_tool_calls?"), bool),
    **dict.fromkeys(("temperature?", "top_p?"), float),
    **dict.fromkeys(("instructions?", "service_tier?", "prompt_cache_key?", "truncation?"), str),
}
_THOUGHT_MARK = "r"


def conversation(body: dict[str, Any], _path: str) -> dict[str, Any]:
    """Return the request as one of chat completions. Raises `MisfitError`."""
    fit(body, _SHAPE, unknown="Unknown parameter")
    given = body["input"]
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not given:
        raise MisfitError("input", "Missing required parameter")
    _check_reasoning(given)
    _check_calls(given)
    chat: dict[str, Any] = {"model": body["model"], "messages": [*_messages(given)]}
    if text := body.get("instructions"):
        chat["messages"].insert(0, {"role": "developer", "content": text})
    if body.get("tools"):
        chat["tools"] = [_tool(tool) for tool in body["tools"]]
        choice = body.get("tool_choice") or "auto"
        if isinstance(choice, dict):
            choice = {"type": "function", "function": {"name": choice["name"]}}
        chat["tool_choice"] = choice
    if body.get("stream"):
        chat |= {"stream": True, "stream_options": {"include_usage": True}}
    return chat


def encrypted(thought: str) -> str:
    """Return the encrypted form of a thought, as the server gives it."""
    return f"encrypted:{thought[::-1]}"


def call_item(name: str, index: int, *, thought: bool) -> str:
    """Return the id of the item of a call; it says whether reasoning came before it."""
    return f"fc_{name}{_THOUGHT_MARK if thought else ''}_{index}"


def _is_answer(item: dict[str, Any]) -> bool:
    kind = item.get("type", "message")
    return kind == "function_call" or (kind == "message" and bool(item["role"] == "assistant"))


def _check_reasoning(items: list[dict[str, Any]]) -> None:
    """Check that reasoning stands before what it led to, and that this has its reasoning."""
    thoughts: set[str] = set()
    for number, item in enumerate(items):
        place, kind, name = f"input[{number}]", item.get("type", "message"), item.get("id") or ""
        if kind == "reasoning":
            if not str(item.get("encrypted_content")).startswith("encrypted:"):
                raise MisfitError(f"{place}.encrypted_content", "could not be verified")
            after = items[number + 1 : number + 2]
            if not after or not (_is_answer(after[0]) or after[0].get("type") == "reasoning"):
                why = "of type 'reasoning' was provided without its required following item."
                raise MisfitError(place, f"Item '{name}' {why}")
            thoughts.add(name)
        elif kind == "function_call" and name.rpartition("_")[0].endswith(_THOUGHT_MARK):
            needed = f"rs_{name.split('_')[1].removesuffix(_THOUGHT_MARK)}"
            if needed not in thoughts:
                why = f"was provided without its required 'reasoning' item: '{needed}'."
                raise MisfitError(place, f"Item '{name}' of type 'function_call' {why}")


def _check_calls(items: list[dict[str, Any]]) -> None:
    """Check that each call has one output, and each output a call before it."""
    called: list[str] = []
    for number, item in enumerate(items):
        if item.get("type") == "function_call":
            fit_id(item["call_id"], _ID, f"input[{number}].call_id")
            called.append(item["call_id"])
        elif item.get("type") == "function_call_output":
            if item["call_id"] not in called:
                why = "No tool call found for function call output with call_id"
                raise MisfitError(f"input[{number}]", f"{why} {item['call_id']}.")
            called.remove(item["call_id"])
    if called:
        raise MisfitError("input", f"No tool output found for function call {called[0]}.")


def _messages(items: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the messages: text and calls of one answer are items of their own here."""
    answer: dict[str, Any] | None = None
    for item in items:
        kind = item.get("type", "message")
        if kind == "reasoning":
            continue
        if kind == "message" and item["role"] == "assistant":
            if answer and answer["content"] is None:  # after its calls, as proxies put it
                answer["content"] = _content(item["content"])
                continue
            if answer:
                yield answer
            answer = {"role": "assistant", "content": _content(item["content"])}
        elif kind == "function_call":
            answer = answer or {"role": "assistant", "content": None}
            answer["tool_calls"] = [*answer.get("tool_calls", ()), _call(item)]
        else:
            if answer:
                yield answer
            answer = None
            yield _other(item)
    if answer:
        yield answer


def _other(item: dict[str, Any]) -> dict[str, Any]:
    if item.get("type") == "function_call_output":
        output = _content(item["output"])
        return {"role": "tool", "tool_call_id": item["call_id"], "content": output}
    return {"role": item["role"], "content": _content(item["content"])}


def _call(item: dict[str, Any]) -> dict[str, Any]:
    function = {"name": item["name"], "arguments": item["arguments"]}
    return {"id": item["call_id"], "type": "function", "function": function}


def _content(content: str | list[dict[str, Any]]) -> Any:
    if isinstance(content, str):
        return content
    if all("text" in part for part in content):
        return "".join(part["text"] for part in content)
    return [{**part, "type": _PARTS.get(part["type"], part["type"])} for part in content]


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = {"name": tool["name"], "parameters": tool["parameters"]}
    return {"type": "function", "function": function}


_CREATED = 1_700_000_000
_WHY = {"length": "max_output_tokens", "content_filter": "content_filter"}


def replying(request: RequestRecord, reply: Reply) -> HttpAnswer:
    """Return the answer that carries `reply`, streamed where the request wants it."""
    usage = reply.usage if reply.send_usage else None
    response = _Response(reply, request, usage)
    pieces = response.events() if request.streams else None
    return chat.carrying(reply, usage, pieces=pieces, body=response.body)


def failing(fault: Fault, sound: HttpAnswer) -> HttpAnswer:
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


def _failed(fault: Fault, sound: HttpAnswer) -> HttpAnswer:
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
