"""OpenAI's Responses API: the request's body, and what its answers mean."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from stepfleet.orchestrator.models.endpoint import ROUTES, Endpoint
from stepfleet.orchestrator.models.failures import stated_failure
from stepfleet.orchestrator.models.media import Media, media_of
from stepfleet.orchestrator.models.pricing.prices import tier_of
from stepfleet.orchestrator.models.services import Api
from stepfleet.orchestrator.records.calls.tools import ToolCall, ToolSpec
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
    broken_off,
    completed_counts,
    count_in,
    encode,
    is_strict,
    json_text,
    malformed,
    parse_body,
    parse_event,
    reasoning_block,
    reasoning_of,
    safe_name,
    shown_reasoning,
    usage_within,
    with_reasoning,
    word,
)
from stepfleet.worker.models.http_model import Format
from stepfleet.worker.models.openai.request import response_format
from stepfleet.worker.models.sent_back import PHASE, SentBack, fields_of_answer, kept_of, model_at

PROVIDER, SERVICE = "openai", "openai-responses"
_WITHOUT_REASONING = re.compile(r"(?:ft:)?(?:gpt-[34]|chatgpt-|gpt-\d[\d.]*-chat)")
"""Models that do not reason: the service refuses them the request for encrypted reasoning."""
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def request_body(request: ModelRequest) -> dict[str, Any]:
    """Return the body of `request`. `extra_body` is merged last and may overrule every field.

    The service stores nothing; what it needs of its reasoning again comes back encrypted.
    """
    body: dict[str, Any] = {
        "model": request.model,
        "input": _input(request),
        "store": False,
    }
    if not _WITHOUT_REASONING.match(request.model):
        body["include"] = ["reasoning.encrypted_content"]
    if request.tools:
        body["tools"] = [_tool(one) for one in request.tools]
        choice = _CHOICES.get(request.tool_choice)
        body["tool_choice"] = choice or {"type": "function", "name": request.tool_choice}
        if request.parallel_tool_calls is not None:
            body["parallel_tool_calls"] = request.parallel_tool_calls
    if request.output:
        body["text"] = {"format": _format(response_format(request.output))}
    return body | _sampling(request.settings) | request.settings.extra_body


def _input(request: ModelRequest) -> list[dict[str, Any]]:
    """Return the items of the conversation; calls have the ids that the model gave them."""
    by = model_at(SERVICE, request.model)
    items = [item for message in request.messages for item in _items(message, by)]
    back = SentBack(request.messages, by)
    for item in items:
        if call_id := item.get("call_id"):
            item["call_id"] = back.id_of(call_id)
    return items


def _sampling(settings: ModelSettings) -> dict[str, Any]:
    effort = settings.reasoning_effort
    fields = {
        "max_output_tokens": settings.max_tokens,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "reasoning": {"effort": effort} if effort else None,
        "service_tier": settings.service_tier,
        "stream": settings.stream or None,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _tool(spec: ToolSpec) -> dict[str, Any]:
    # Without the field the service demands what strict mode does, and changes schemas to fit.
    return {
        "type": "function",
        "name": spec.name,
        "description": spec.description,
        "parameters": spec.parameters or {"type": "object", "properties": {}},
        "strict": is_strict(spec, by_default=True),
    }


def _format(chat: dict[str, Any]) -> dict[str, Any]:
    """Return the form of an answer as Responses has it: what chat completions nest is flat."""
    return {"type": chat["type"], **chat.get("json_schema", {})}


def _items(message: Message, by: str) -> Iterator[dict[str, Any]]:
    if message.role is Role.TOOL:
        yield _result(message.tool_call_id or "", message.content)
    elif message.role is Role.ASSISTANT:
        yield from _answer(message, by)
    else:
        yield from _given(message)


def _answer(message: Message, by: str) -> Iterator[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if message.text:
        phase = fields_of_answer(message, by, reasoning=False).get(PHASE, "")
        items.append(said_in(phase, message.text))
    blocks = message.content if isinstance(message.content, list) else []
    used = [block["toolUse"] for block in blocks if "toolUse" in block]
    items += [_call(one["toolUseId"], one["name"], one.get("input", {})) for one in used]
    items += [_call(one.id, one.name, one.arguments) for one in message.tool_calls]
    yield from with_reasoning(items, reasoning_of(message, PROVIDER))


def said_in(phase: str, text: str) -> dict[str, Any]:
    """Return the item of what a model said; the service asks for the phase that it gave it."""
    phased = {PHASE: phase} if phase else {}
    return {"type": "message", "role": "assistant", "content": text, **phased}


def _given(message: Message) -> Iterator[dict[str, Any]]:
    content = message.content
    if isinstance(content, list):
        results = [block["toolResult"] for block in content if "toolResult" in block]
        yield from (_result(one["toolUseId"], one.get("content", "")) for one in results)
        content = [block for block in content if "toolResult" not in block]
        if results and not content:
            return
    yield {"type": "message", "role": message.role.value, "content": _content(content)}


def _call(call_id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "function_call",
        "call_id": call_id,
        "name": safe_name(name) or NO_NAME,
        "arguments": json_text(arguments),
    }


def _result(call_id: str, content: Content) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": _content(content)}


def _content(content: Content) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    return [_part(block) for block in content if REASONING not in block]


def _part(block: Block) -> dict[str, Any]:
    """Return one block in the service's form; kinds unknown here pass unchanged."""
    if "type" in block:
        return block
    if "text" in block or "json" in block:
        text = str(block["text"]) if "text" in block else json_text(block["json"])
        return {"type": "input_text", "text": text}
    media = media_of(block)
    return block if media is None else _media(media)


def _media(media: Media) -> dict[str, Any]:
    if media.kind == "image":
        field = "file_id" if media.source == "file_id" else "image_url"
        value = media.value if field == "file_id" else media.address
        return {"type": "input_image", field: value, "detail": media.detail}
    match media.source:
        case "file_id":
            return {"type": "input_file", "file_id": media.value}
        case "url":
            return {"type": "input_file", "file_url": media.value}
    return {"type": "input_file", "filename": media.name, "file_data": media.address}


_PARTS = {
    "response.output_text": ("output_text", "text"),
    "response.refusal": ("refusal", "refusal"),
}
_ARGUMENTS = "response.function_call_arguments"
_MESSAGE, _CALL = "message", "function_call"
_ANSWERS = {_MESSAGE, _CALL}
COMMENTARY, FINAL = "commentary", "final_answer"
"""Phases of messages: what a model says on its way, and the answer itself."""


@dataclass(slots=True)
class _Item:
    """One item so far; `known` is what an event has said of it as an object."""

    place: int
    kind: str
    is_named: bool = False
    known: dict[str, Any] = field(default_factory=dict)
    is_whole: bool = False
    parts: dict[tuple[int, str], list[str]] = field(default_factory=dict)
    arguments: list[str] = field(default_factory=list)

    def is_other(self, given: dict[str, Any]) -> bool:
        """Return whether an event's item is another call than this."""
        known, named = self.known.get("call_id"), given.get("call_id")
        return bool(known and named and known != named)

    def payload(self) -> dict[str, Any]:
        told: dict[str, Any] = {}
        if self.parts:
            fields = dict(_PARTS.values())
            told["content"] = [
                {"type": type_, fields[type_]: "".join(pieces)}
                for (_, type_), pieces in sorted(self.parts.items())
            ]
        if self.arguments:
            told["arguments"] = "".join(self.arguments)
        if self.is_whole:
            told = {name: value for name, value in told.items() if not self.known.get(name)}
        return {**self.known, "type": self.kind, **told}


class StreamedItems:
    """The items so far, in the order of their indexes. `size` is their text and calls."""

    def __init__(self) -> None:
        self.size = 0
        self._items: list[_Item] = []
        self._known: dict[tuple[str, int | str], _Item] = {}
        self._newest: dict[str, _Item] = {}

    @property
    def are_whole(self) -> bool:
        """Whether each item was told to be completed, an answer among them."""
        return any(one.kind in _ANSWERS for one in self._items) and all(
            one.is_whole and one.known.get("status", "completed") == "completed"
            for one in self._items
        )

    def add(self, kind: str, event: dict[str, Any]) -> str:
        """Take an event of the type `kind` and return the piece of text in it."""
        name, _, phase = kind.rpartition(".")
        if name in _PARTS and phase in ("delta", "done"):
            type_, said = _PARTS[name]
            text = word(event.get("delta" if phase == "delta" else said))
            return self._add_text(event, type_, text, is_piece=phase == "delta")
        if kind == "response.content_part.done" and isinstance(part := event.get("part"), dict):
            for type_, said in _PARTS.values():
                if part.get("type") == type_:
                    return self._add_text(event, type_, word(part.get(said)), is_piece=False)
        elif name == _ARGUMENTS and phase in ("delta", "done"):
            self._add_arguments(event, phase)
        elif name == "response.output_item" and phase in ("added", "done"):
            self._keep(event, is_whole=phase == "done")
        return ""

    def output(self, final: Any) -> Any:
        """Return the items of the answer; `final` are those of the stream's last event.

        Items that were told are missing from it on some servers: then it has no text and no call.
        """
        told = [one.payload() for one in sorted(self._items, key=lambda one: (one.place, one.kind))]
        if not final:
            return told
        if isinstance(final, list) and not any(_is_answer(one) for one in final):
            return [*final, *(one for one in told if _is_answer(one))]
        return final

    def _add_text(self, event: dict[str, Any], type_: str, text: str, *, is_piece: bool) -> str:
        item = self._at(event, _MESSAGE)
        if not text or item is None:
            return ""
        at = event.get("content_index")
        pieces = item.parts.setdefault((at if isinstance(at, int) else 0, type_), [])
        if not is_piece and pieces:  # all of them once more
            pieces[:] = [text]
            return ""
        pieces.append(text)
        self.size += len(text)
        is_aside = type_ != "output_text" or item.known.get("phase") == COMMENTARY
        return "" if is_aside else text

    def _add_arguments(self, event: dict[str, Any], phase: str) -> None:
        if (item := self._at(event, _CALL)) is None:
            return
        if phase == "delta":
            piece = word(event.get("delta"))
            item.arguments.append(piece)
            self.size += len(piece)
            return
        if text := word(event.get("arguments")):
            self.size += 0 if item.arguments else len(text)
            item.arguments = [text]
        if not item.known.get("name") and (name := word(event.get("name"))):
            item.known = {**item.known, "name": name}
        if not item.is_whole:
            item.known = {**item.known, "status": "completed"}

    def _keep(self, event: dict[str, Any], *, is_whole: bool) -> None:
        given = event.get("item")
        if not isinstance(given, dict):
            return
        item = self._at(event, word(given.get("type")), given, begins=not is_whole)
        if item is not None:
            item.known, item.is_whole = given, is_whole

    def _at(
        self,
        event: dict[str, Any],
        kind: str,
        given: dict[str, Any] | None = None,
        *,
        begins: bool = False,
    ) -> _Item | None:
        """Return the item that an event is about, None where there are too many.

        `given` is the event's own item; `begins` one that it begins.
        """
        index, given = event.get("output_index"), given or {}
        told = (event.get("item_id"), given.get("id"), given.get("call_id"))
        names = [one for one in map(word, told) if one]
        keys = [index] if isinstance(index, int) else names
        found = (self._known[kind, key] for key in keys if (kind, key) in self._known)
        item = next(found, None)
        if item is None and not isinstance(index, int) and not begins:
            item = self._open(kind, given, is_named=bool(names))
        if item is None or (item.is_whole and item.is_other(given)):
            if len(self._items) >= MOST_BLOCKS:
                return None
            last = max((one.place for one in self._items[-1:]), default=-1)
            item = _Item(index if isinstance(index, int) else last + 1, kind)
            self._items.append(item)
        item.is_named = item.is_named or bool(event.get("item_id") or given.get("id"))
        self._known |= {(kind, key): item for key in (*keys, *names)}
        self._newest[kind] = item
        return item

    def _open(self, kind: str, given: dict[str, Any], *, is_named: bool) -> _Item | None:
        """Return the newest item of a kind that has not ended: pieces without an index are its."""
        item = self._newest.get(kind)
        if item is None or item.is_whole or item.is_other(given) or (is_named and item.is_named):
            return None
        return item


def _is_answer(item: Any) -> bool:
    return isinstance(item, dict) and word(item.get("type")) in _ANSWERS


_UNREAD = {
    "image_generation_call": "an image",
    **dict.fromkeys(("output_audio", "audio"), "audio"),
    **{
        kind: f"an item of type {kind!r}"
        for kind in (
            *("custom_tool_call", "mcp_approval_request", "computer_call"),
            *("local_shell_call", "shell_call", "apply_patch_call"),
        )
    },
}
"""Items that a model ends its turn with, and that are neither text nor calls of our tools."""
_ENDS = {f"response.{end}" for end in ("completed", "incomplete", "failed", "done")}
_COMPLETED = ("completed", "complete")
_NOT_ENDED = {"queued", "in_progress", "failed", "cancelled"}
_ASIDE = "aside"
_INPUT = "input_tokens_details"
_CUT = (
    "the answer was cut before this call was finished (its token limit, usually); the call was not "
    "executed: make it again, shorter"
)


def parse_response(payload: dict[str, Any], default_model: str) -> LLMResponse:
    """Return an answer as the fleet's; `default_model` names the model where it does not."""
    if word(payload.get("status")) in _NOT_ENDED:
        raise broken_off(payload["status"])
    output = payload.get("output")
    if not isinstance(output, list) or not all(isinstance(item, dict) for item in output):
        raise malformed("its output is not a list of items")
    texts: list[str] = []
    refusals: list[str] = []
    calls: list[dict[str, Any]] = []
    reasoning: list[Block] = []
    thoughts: list[str] = []
    says = False
    has_final = any(_phase(item) == FINAL for item in output)
    for item in output:
        kind = _ASIDE if _is_aside(item, has_final) else item.get("type")
        thoughts += _thoughts(item, kind)
        if (back := _back(item, kind)) and len(reasoning) < MOST_REASONING:
            reasoning.append(reasoning_block(PROVIDER, says + len(calls), back))
        if kind == "message":
            said = _said(item)
            says = says or any(said)
            texts += said
        elif kind == "function_call":
            calls.append({**item, "id": item.get("call_id")})
        refusals += _texts(item, "refusal", "refusal")
    found = _executable(parse_tool_calls(calls, new_id=new_call_id), calls, payload)
    phased = {PHASE: FINAL} if has_final else {}
    ids = [{"id": one["id"]} for one in calls]  # LiteLLM reads nothing else of a call
    reason = _reason(payload, has_calls=bool(found))
    if refusals and not texts and not found:
        texts, reason = refusals, FinishReason.CONTENT_FILTER
    model = payload.get("model")
    return LLMResponse.model_construct(
        content="".join(texts),
        tool_calls=found or None,
        usage=usage_of(payload.get("usage")),
        model=model if isinstance(model, str) and model else default_model,
        service_tier=tier_of(payload.get("service_tier")),
        finish_reason=reason,
        reasoning=(*reasoning, *kept_of(phased, ids, model_at(SERVICE, default_model))),
        reasoning_text=shown_reasoning(thoughts),
        raw=payload,
        unread=next(
            (_UNREAD[one] for item in output if (one := word(item.get("type"))) in _UNREAD), ""
        ),
    )


def _executable(
    found: tuple[ToolCall, ...], calls: list[dict[str, Any]], payload: dict[str, Any]
) -> tuple[ToolCall, ...]:
    """Return the calls; one that the model did not finish is answered, and not executed."""
    cut = {"incomplete"}
    if payload.get("status") == "incomplete":
        cut.add("in_progress")
    return tuple(
        ToolCall(id=one.id, name=one.name, error=one.error or _CUT)
        if word(call.get("status")) in cut
        else one
        for one, call in zip(found, calls, strict=False)  # the calls are bounded
    )


def _phase(item: dict[str, Any]) -> str:
    return word(item.get(PHASE)) if item.get("type") == "message" else ""


def _is_aside(item: dict[str, Any], has_final: bool) -> bool:
    """Return whether a message is what the model said on its way to the answer."""
    is_message, phase = item.get("type") == "message", _phase(item)
    return is_message and (phase == COMMENTARY or (has_final and phase != FINAL))


def _thoughts(item: dict[str, Any], kind: Any) -> list[str]:
    if kind == "reasoning":
        return _texts({"content": item.get("summary")}, "summary_text", "text")
    return _said(item) if kind == _ASIDE else []


def _back(item: dict[str, Any], kind: Any) -> dict[str, Any] | None:
    """Return what goes back of an item at its place in the answer."""
    if kind == "reasoning" and item.get("encrypted_content"):  # others are not known again
        return {name: value for name, value in item.items() if name != "status"}
    if kind == _ASIDE and (text := "".join(_said(item))):
        return said_in(_phase(item), text)
    return None


def _said(message: dict[str, Any]) -> list[str]:
    return _texts(message, "output_text", "text") or _texts(message, "text", "text")


def _texts(message: dict[str, Any], kind: str, field: str) -> list[str]:
    content = message.get("content")
    if isinstance(content, str):  # as in a request
        content = [{"type": "output_text", "text": content}]
    parts = content if isinstance(content, list) else []
    found = (one.get(field) for one in parts if isinstance(one, dict) and one.get("type") == kind)
    return [text for text in found if isinstance(text, str)]


def _reason(payload: dict[str, Any], *, has_calls: bool) -> FinishReason:
    if payload.get("status") == "incomplete":
        details = payload.get("incomplete_details")
        why = details.get("reason") if isinstance(details, dict) else None
        known = {
            "max_output_tokens": FinishReason.LENGTH,
            "content_filter": FinishReason.CONTENT_FILTER,
        }
        return known.get(word(why), FinishReason.OTHER)
    if has_calls:
        return FinishReason.TOOL_CALLS
    return FinishReason.STOP if payload.get("status") in _COMPLETED else FinishReason.OTHER


def usage_of(usage: Any) -> UsageStats | None:
    """Return the token counts of one call, or None when they are absent or no counts."""
    if not isinstance(usage, dict):
        return None
    names = ("input_tokens", "output_tokens", "total_tokens")
    if (counts := completed_counts(*map(usage.get, names))) is None:
        return None
    return usage_within(
        *counts,
        cached=count_in(usage, (_INPUT, "cached_tokens")),
        written=count_in(usage, (_INPUT, "cache_write_tokens")),
        thought=count_in(usage, ("output_tokens_details", "reasoning_tokens")),
    )


class StreamedResponse:
    """The answer so far. `error` is the payload of a failure that came as an event."""

    def __init__(self) -> None:
        self.error: dict[str, Any] | None = None
        self.usage: Any = None
        self._items = StreamedItems()
        self._response: dict[str, Any] | None = None
        self._is_done = False
        self._begun: dict[str, Any] = {}

    @property
    def size(self) -> int:
        """How many characters of text and calls it has."""
        return self._items.size

    @property
    def is_over(self) -> bool:
        """Whether nothing of interest follows."""
        return self._is_done or self._response is not None or self.error is not None

    @property
    def finished(self) -> bool:
        """Whether its own finish reason has come: then it is whole, whatever else may follow."""
        return self._response is not None or (self._is_done and self._items.are_whole)

    def add(self, data: bytes) -> str:
        """Add one event and return the piece of text in it. Raises `ModelError` if malformed."""
        if data == DONE:  # chat's word for the end
            self._is_done = True
            return ""
        event = parse_event(data)
        kind = word(event.get("type"))
        if kind in _ENDS:
            self._end(event.get("response"))
        elif kind == "error":
            self.error = event if event.get("error") else {"error": event}
        elif not kind or event.get("error"):
            self.error = stated_failure(event, "type")
        else:
            begun = event.get("response")
            self._begun = begun if isinstance(begun, dict) else self._begun
            return self._items.add(kind, event)
        return ""

    def payload(self) -> dict[str, Any]:
        """Return the whole answer. Raises `ModelError` when the stream broke off."""
        if not self.finished:
            raise malformed("the stream broke off")
        response = self._response or {**self._begun, "status": "completed"}
        return {**response, "output": self._items.output(response.get("output"))}

    def _end(self, response: Any) -> None:
        if not isinstance(response, dict):
            raise malformed("the stream's last event has no response")
        self.usage = response.get("usage")
        self._response = response


def _body(request: ModelRequest, _: Endpoint) -> bytes:
    return encode(request_body(request))


RESPONSES = Format(
    route=ROUTES[Api.RESPONSES],
    body=_body,
    parse=parse_body,
    stream=StreamedResponse,
    usage=usage_of,
    response=parse_response,
    failure=partial(stated_failure, answer="output"),
)
