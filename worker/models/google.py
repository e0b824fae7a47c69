"""Google's Gemini API, `generateContent`: the request's body, and what its answers mean."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from stepfleet.orchestrator.models.endpoint import ROUTES, Endpoint
from stepfleet.orchestrator.models.failures import stated_failure
from stepfleet.orchestrator.models.media import media_of
from stepfleet.orchestrator.models.pricing.prices import tier_of
from stepfleet.orchestrator.models.services import Api
from stepfleet.orchestrator.records.conversation.messages import (
    REASONING,
    Block,
    Content,
    Message,
    Role,
)
from stepfleet.orchestrator.records.responses import LLMResponse, ModelRequest, ModelSettings
from stepfleet.orchestrator.records.steps import FinishReason
from stepfleet.orchestrator.records.usage import UsageStats, token_count
from stepfleet.orchestrator.tools import parse_tool_calls
from stepfleet.orchestrator.tools.calls import MOST_CALLS
from stepfleet.worker.attempt.sanitize import new_call_id
from stepfleet.worker.models.bodies import (
    DONE,
    MOST_BLOCKS,
    MOST_REASONING,
    NO_NAME,
    alternating_turns,
    blocked,
    encode,
    json_text,
    malformed,
    media_of_type,
    merged_usage,
    parse_body,
    parse_event,
    reasoning_block,
    reasoning_of,
    safe_name,
    shown_reasoning,
    word,
)
from stepfleet.worker.models.http_model import Format

PROVIDER = "google"
_MODES = {"auto": "AUTO", "any": "ANY", "none": "NONE"}
_FOREIGN = "skip_thought_signature_validator"
"""The service's word for calls that another provider's model made: they have no signature."""


def request_body(request: ModelRequest) -> dict[str, Any]:
    """Return the body of `request`. `extra_body` is merged last and may overrule every field."""
    names = {call.id: call.name for one in request.messages for call in one.tool_calls}
    body: dict[str, Any] = {
        "contents": alternating_turns(
            (one for one in request.messages if not one.is_system()),
            partial(_parts_of, names=names),
            assistant="model",
            field="parts",
        )
    }
    system = [{"text": one.text} for one in request.messages if one.is_system() and one.text]
    if system:
        body["systemInstruction"] = {"parts": system}
    if request.tools:
        declared = [_tool(one.name, one.description, one.parameters) for one in request.tools]
        body["tools"] = [{"functionDeclarations": declared}]
        body["toolConfig"] = {"functionCallingConfig": _choice(request.tool_choice)}
    if config := _generation(request):
        body["generationConfig"] = config
    if request.settings.service_tier:
        body["serviceTier"] = request.settings.service_tier
    return body | request.settings.extra_body


def _generation(request: ModelRequest) -> dict[str, Any]:
    settings, output = request.settings, request.output
    fields = {
        "temperature": settings.temperature,
        "topP": settings.top_p,
        "maxOutputTokens": settings.max_tokens,
        "stopSequences": list(settings.stop) or None,
        "seed": settings.seed,
        "responseMimeType": "application/json" if output else None,
        "responseJsonSchema": output.json_schema if output else None,
        "thinkingConfig": _thinking(settings),
    }
    return {name: value for name, value in fields.items() if value is not None}


def _thinking(settings: ModelSettings) -> dict[str, Any] | None:
    if settings.reasoning_budget is not None:
        return {"thinkingBudget": settings.reasoning_budget}
    if settings.reasoning_effort is None:
        return None
    if settings.reasoning_effort == "none":
        return {"thinkingBudget": 0}
    return {"thinkingLevel": settings.reasoning_effort.upper()}


def _tool(name: str, description: str, parameters: dict[str, Any]) -> dict[str, Any]:
    schema = parameters or {"type": "object", "properties": {}}
    return {"name": name, "description": description, "parametersJsonSchema": schema}


def _choice(choice: str) -> dict[str, Any]:
    if choice in _MODES:
        return {"mode": _MODES[choice]}
    return {"mode": "ANY", "allowedFunctionNames": [choice]}


def _parts_of(message: Message, names: dict[str, str]) -> Iterator[dict[str, Any]]:
    if message.role is Role.TOOL:
        call_id = message.tool_call_id or ""
        yield _result(call_id, message.name or names.get(call_id, ""), message.content)
        return
    parts = list(_request_parts(message.content, names))
    if message.role is Role.ASSISTANT:
        parts += [_call(one.id, one.name, one.arguments) for one in message.tool_calls]
        parts = _signed(parts, reasoning_of(message, PROVIDER))
    yield from parts


def _signed(
    parts: list[dict[str, Any]], reasoning: list[tuple[int, dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Return the parts with the signatures that they came with.

    The service refuses the first call of an answer without one.
    """
    signed = list(parts)
    for at, data in reasoning:
        if at < len(parts):
            signed[at] = {**parts[at], **data}
        else:
            signed.append({"text": "", **data})
    first = next((i for i, part in enumerate(signed) if "functionCall" in part), None)
    if first is not None and not any("thoughtSignature" in part for part in signed):
        signed[first] = {**signed[first], "thoughtSignature": _FOREIGN}
    return signed


def _request_parts(content: Content, names: dict[str, str]) -> Iterator[dict[str, Any]]:
    if isinstance(content, str):
        content = [{"text": content}] if content else []
    for block in content:
        if REASONING not in block and block.get("text") != "":
            yield _part(block, names)


def _part(block: Block, names: dict[str, str]) -> dict[str, Any]:
    """Return one block in the service's form; kinds unknown here pass unchanged."""
    if "text" in block or "json" in block:
        return {"text": str(block["text"]) if "text" in block else json_text(block["json"])}
    if "toolUse" in block:
        used = block["toolUse"]
        names[used["toolUseId"]] = used["name"]
        return _call(used["toolUseId"], used["name"], used.get("input", {}))
    if "toolResult" in block:
        given = block["toolResult"]
        call_id = given["toolUseId"]
        return _result(call_id, names.get(call_id, ""), given.get("content", ""))
    media = media_of(block)
    if media is None:
        return block
    if media.url:
        return {"fileData": {"mimeType": media.media_type, "fileUri": media.url}}
    return {"inlineData": {"mimeType": media.media_type, "data": media.data}}


def _call(call_id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    named = safe_name(name) or NO_NAME
    return {"functionCall": {"id": call_id, "name": named, "args": arguments}}


def _result(call_id: str, name: str, content: Content) -> dict[str, Any]:
    parts = [] if isinstance(content, str) else list(_request_parts(content, {}))
    texts = [content] if isinstance(content, str) else [part.get("text", "") for part in parts]
    result: dict[str, Any] = {
        "id": call_id,
        "name": safe_name(name) or NO_NAME,
        "response": {"result": "".join(texts)},
    }
    if media := [part for part in parts if "inlineData" in part or "fileData" in part]:
        result["parts"] = media
    return {"functionResponse": result}


_SIGNATURE = "thoughtSignature"
_SAID = "finishMessage"
_LONGEST_MESSAGE = 500
_REFUSALS = (
    "SAFETY RECITATION BLOCKLIST PROHIBITED_CONTENT SPII MODEL_ARMOR LANGUAGE IMAGE_SAFETY"
    " IMAGE_PROHIBITED_CONTENT IMAGE_RECITATION"
)
_REASONS = {
    "STOP": FinishReason.STOP,
    "MAX_TOKENS": FinishReason.LENGTH,
    **dict.fromkeys(_REFUSALS.split(), FinishReason.CONTENT_FILTER),
}
_MISTAKES = {
    "MALFORMED_FUNCTION_CALL",
    "UNEXPECTED_TOOL_CALL",
    "MALFORMED_RESPONSE",
    "MISSING_THOUGHT_SIGNATURE",
    "TOO_MANY_TOOL_CALLS",
}
"""Finish reasons of answers that the service could not read itself."""


def parse_content(payload: dict[str, Any], default_model: str) -> LLMResponse:
    """Return an answer as the fleet's; `default_model` names the model where it does not."""
    candidate = _candidate(payload)
    reason = word(candidate.get("finishReason"))
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    reasoning: list[Block] = []
    says = False
    for part in _parts(candidate):
        signature, call, text = part.get(_SIGNATURE), part.get("functionCall"), part.get("text")
        if isinstance(signature, str) and signature and len(reasoning) < MOST_REASONING:
            # It goes back with its part: all texts are the first one, and an empty one is its own.
            has_text = says or bool(text)
            at = 0 if has_text and not isinstance(call, dict) else says + len(calls)
            reasoning.append(reasoning_block(PROVIDER, at, {_SIGNATURE: signature}))
        if isinstance(call, dict):
            calls.append({**call, "arguments": call.get("args")})
        elif isinstance(text, str):
            (thoughts if part.get("thought") else texts).append(text)
            says = says or bool(text and not part.get("thought"))
    if not calls and reason in _MISTAKES:
        raise malformed(f"it ended with {reason}{_said(candidate)}")
    known = _REASONS.get(reason, FinishReason.OTHER)
    found = parse_tool_calls(calls, new_id=new_call_id)
    if found and (known is FinishReason.STOP or not reason):
        known = FinishReason.TOOL_CALLS
    if known is FinishReason.CONTENT_FILTER and not says:
        raise blocked(f"finishReason {reason}", word(candidate.get(_SAID)))
    model, usage = payload.get("modelVersion"), payload.get("usageMetadata")
    counted = usage if isinstance(usage, dict) else {}
    return LLMResponse.model_construct(
        content="".join(texts),
        tool_calls=found or None,
        usage=usage_of(usage),
        model=model if isinstance(model, str) and model else default_model,
        service_tier=tier_of(counted.get("serviceTier"), counted.get("trafficType")),
        finish_reason=known,
        reasoning=tuple(reasoning),
        reasoning_text=shown_reasoning(thoughts),
        raw=payload,
        unread=next(filter(None, map(_unread, _parts(candidate))), ""),
    )


def _unread(part: dict[str, Any]) -> str:
    """Return what a part has that is neither text nor a call; images of thoughts are drafts."""
    found = (part.get(field) for field in ("inlineData", "fileData"))
    data = next((one for one in found if isinstance(one, dict)), None)
    return "" if data is None or part.get("thought") else media_of_type(data.get("mimeType"))


def _said(candidate: dict[str, Any]) -> str:
    message = word(candidate.get(_SAID))
    return f": {message[:_LONGEST_MESSAGE]}" if message else ""


def _candidate(payload: dict[str, Any]) -> dict[str, Any]:
    candidates = payload.get("candidates")
    if isinstance(candidates, list) and candidates and isinstance(candidates[0], dict):
        return candidates[0]
    feedback = payload.get("promptFeedback")
    if isinstance(feedback, dict) and feedback.get("blockReason"):
        # The prompt itself was refused.
        reason = f"blockReason {word(feedback['blockReason'])}"
        raise blocked(reason, word(feedback.get("blockReasonMessage")))
    raise malformed("it has no candidates")


def _parts(candidate: dict[str, Any]) -> list[dict[str, Any]]:
    content = candidate.get("content") or {}
    parts = content.get("parts") or [] if isinstance(content, dict) else None
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise malformed("the first candidate's content has no list of parts")
    return parts


def usage_of(usage: Any) -> UsageStats | None:
    """Return the token counts of one call, or None when they are absent or no counts."""
    if not isinstance(usage, dict):
        return None
    prompt = token_count(usage.get("promptTokenCount"))
    if prompt is None:
        return None
    prompt += token_count(usage.get("toolUsePromptTokenCount")) or 0
    thought = token_count(usage.get("thoughtsTokenCount")) or 0
    said = token_count(usage.get("candidatesTokenCount"))
    if said is None:  # an answer without text has none; proxies may leave out those of others
        total = token_count(usage.get("totalTokenCount"))
        if total is None:
            return None
        said = max(total - prompt - thought, 0)
    completion = said + thought
    return UsageStats.model_construct(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        llm_calls=1,
        cached_tokens=token_count(usage.get("cachedContentTokenCount")) or 0,
        reasoning_tokens=thought,
        audio_tokens=_audio(usage.get("promptTokensDetails"))
        + _audio(usage.get("candidatesTokensDetails")),
    )


def _audio(details: Any) -> int:
    counts = [one for one in details if isinstance(one, dict)] if isinstance(details, list) else []
    return sum(
        token_count(one.get("tokenCount")) or 0 for one in counts if one.get("modality") == "AUDIO"
    )


_HEAD = ("modelVersion", "promptFeedback", "responseId")
_PIECES = {"candidates", "usageMetadata", *_HEAD}
"""Every event but a failure has one of these."""


class StreamedContent:
    """The answer so far. `error` is the payload of a failure that came as an event."""

    def __init__(self) -> None:
        self.error: dict[str, Any] | None = None
        self.usage: Any = None
        self._size = 0
        self._calls = 0
        self._head: dict[str, Any] = {}
        self._has_begun = False
        self._is_closed = False
        self._candidate: dict[str, Any] = {}
        self._parts: list[dict[str, Any]] = []

    @property
    def size(self) -> int:
        """How many characters of text and calls it has."""
        return self._size

    @property
    def is_over(self) -> bool:
        """Whether nothing of interest follows: usage may come after the finish reason."""
        return self._is_closed or self.error is not None

    @property
    def finished(self) -> bool:
        """Whether its own finish reason has come: then it is whole, whatever else may follow."""
        return bool(self._candidate)

    def add(self, data: bytes) -> str:
        """Add one event and return the piece of text in it. Raises `ModelError` if malformed."""
        if data == DONE:  # chat's word for the end
            self._is_closed = True
            return ""
        return self.take(parse_event(data), len(data))

    def take(self, event: dict[str, Any], size: int) -> str:
        """Add one event of `size` bytes and return the piece of text in it."""
        self.usage = merged_usage(self.usage, event.get("usageMetadata"))
        if event.get("error") or not event.keys() & _PIECES:
            self.error = stated_failure(event, "candidates")
            return ""
        self._head |= {name: event[name] for name in _HEAD if name in event}
        if not event.get("candidates"):
            return ""
        candidate = _candidate(event)
        self._has_begun = True
        if candidate.get("finishReason"):
            self._candidate = {name: candidate.get(name) for name in ("finishReason", _SAID)}
        before = self._calls
        text = "".join(map(self._add, _parts(candidate)))
        self._size += size if before < self._calls <= MOST_CALLS else 0
        return text

    def payload(self) -> dict[str, Any]:
        """Return the whole answer. Raises `ModelError` when the stream broke off."""
        if not self._candidate and "promptFeedback" not in self._head:
            no_end = "the stream broke off" if self._has_begun else "it has no candidates"
            raise malformed(no_end)
        whole = {**self._head, "usageMetadata": self.usage}
        if not self._candidate:
            return whole
        content = {"parts": self._parts}
        return {**whole, "candidates": [{**self._candidate, "content": content}]}

    def _add(self, part: dict[str, Any]) -> str:
        text = part.get("text")
        self._calls += isinstance(part.get("functionCall"), dict)
        if self._calls <= MOST_CALLS + 1 and len(self._parts) < MOST_BLOCKS:
            self._parts.append(part)
        if not isinstance(text, str):
            return ""
        self._size += len(text)
        return "" if part.get("thought") else text


def _body(request: ModelRequest, _: Endpoint) -> bytes:
    return encode(request_body(request))


def _parse(body: bytes) -> dict[str, Any]:
    """Return the answer; proxies that drop `alt=sse` give a list of a stream's events."""
    if body.lstrip()[:1] != b"[":
        return parse_body(body)
    stream = StreamedContent()
    for event in parse_body(b'{"events":%s}' % body)["events"]:
        if not isinstance(event, dict):
            raise malformed("an event of its list is not a JSON object")
        stream.take(event, 0)
    return stream.error or stream.payload()


GENERATE_CONTENT = Format(
    route=ROUTES[Api.GENERATE_CONTENT],
    body=_body,
    parse=_parse,
    stream=StreamedContent,
    usage=usage_of,
    usage_field="usageMetadata",
    response=parse_content,
    failure=partial(stated_failure, answer="candidates"),
)
