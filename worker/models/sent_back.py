"""What a service must get back with an answer, besides what its protocol has. Pure.

Gemini signs its calls. After Google's endpoint of chat completions the signature stands in
`extra_content`, behind LiteLLM in `provider_specific_fields` or in a long id, and what Claude
thought in `thinking_blocks`. Kimi and DeepSeek refuse an answer with calls that comes back without
the field of its reasoning, even an empty one. It is kept as reasoning of the model that gave it,
and no other model gets it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stepfleet.orchestrator.records.conversation.messages import Block, Message
from stepfleet.orchestrator.tools.calls import MOST_CALLS
from stepfleet.orchestrator.tools.schemas.bounded_json import BoundsError, plain_json
from stepfleet.worker.models.bodies import reasoning_block, reasoning_of

EXTRA, SPECIFIC, THOUGHTS = "extra_content", "provider_specific_fields", "thinking_blocks"
PHASE = "phase"
"""The field of Responses that tells an answer from what its model says on the way to it."""
REASONING_FIELDS = ("reasoning_content", "reasoning")
MOST_KEPT = 256 * 1024
"""Bytes of what is kept of one answer."""
_FIELDS = frozenset({EXTRA, SPECIFIC, THOUGHTS, PHASE, *REASONING_FIELDS})
_BEFORE = "before_text"
_SIGNATURES = ("thought_signature", "signature")
_SHORT_ID = 40
"""Characters of ids that every service takes."""
_FOREIGN = {EXTRA: {"google": {"thought_signature": "skip_thought_signature_validator"}}}
"""Google's word for calls that another model made: they have no signature."""


def model_at(service: str, model: str) -> str:
    """Return the name under which what a model of `service` gave is kept; "" for no service."""
    return service and f"{service}:{model}"


def kept_of(
    message: Mapping[str, Any], calls: Any, by: str, *, apart: str = "", before: str = ""
) -> tuple[Block, ...]:
    """Return the block of what goes back with an answer; nothing unless `by` is a model.

    `calls` are those of the answer as they came, in their order, each with its `id`. `apart` is a
    field of reasoning that is kept by itself, where the answer has it; `before` is the thought that
    stood before its text.
    """
    listed = calls[: MOST_CALLS + 1] if isinstance(calls, list) else []
    given = [_object(one) for one in listed]
    if not (before or any(map(_has_more, given))) and _FIELDS.isdisjoint(message):
        return ()
    found = {str(at): kept for at, call in enumerate(given) if (kept := _of_call(call))}
    answer = _of_message(message, given)
    if given and THOUGHTS not in answer and not message.get(apart):
        answer |= _reasoning(message)
    if given and before:
        answer[_BEFORE] = before
    parts = {"message": answer, "calls": found}
    data = {name: part for name, part in parts.items() if part}
    if not data or not by:
        return ()
    try:
        return (reasoning_block(by, 0, plain_json(data, limit=MOST_KEPT)),)
    except BoundsError:
        return ()  # nobody must get back so much: the service says what is missing


def add_extra(known: dict[str, Any], delta: Mapping[str, Any]) -> None:
    """Add what a piece of a stream has of it: fields of a later one win."""
    for name in (EXTRA, SPECIFIC):
        if isinstance(given := delta.get(name), dict):
            known.setdefault(name, {}).update(given)


class SentBack:
    """What the model `by` is to get back with the answers of a conversation.

    Its calls have ids of which no two are the same.
    """

    def __init__(self, messages: Sequence[Message], by: str) -> None:
        self._calls: dict[str, dict[str, Any]] = {}
        self._ids: dict[str, str] = {}
        used: set[str] = set()
        for message in messages if by else ():
            calls: dict[str, Any] = {}
            for _, data in reasoning_of(message, by):
                calls = _object(data.get("calls"))
            for index, call in enumerate(message.tool_calls):
                kept = _object(calls.get(str(index)))
                self._calls[call.id] = _known(kept)
                name = kept.get("id")
                if isinstance(name, str) and name not in used:
                    self._ids[call.id] = name
                used.add(self.id_of(call.id))

    def id_of(self, call_id: str) -> str:
        """Return the id under which its service knows a call."""
        return self._ids.get(call_id, call_id)

    def fields_of(self, call_id: str) -> dict[str, Any]:
        """Return the fields that go back with a call."""
        return self._calls.get(call_id, {})


def fields_of_answer(message: Message, by: str, *, reasoning: bool) -> dict[str, Any]:
    """Return the fields that go back with an answer itself, with or without its reasoning."""
    found: dict[str, Any] = {}
    for _, data in reasoning_of(message, by):
        found |= _known(_object(data.get("message")))
    return found if reasoning else {k: v for k, v in found.items() if k not in REASONING_FIELDS}


def before_text(message: Message, by: str) -> str:
    """Return the thought that goes back before an answer's text."""
    found = (_object(data.get("message")).get(_BEFORE) for _, data in reasoning_of(message, by))
    return "".join(one for one in found if isinstance(one, str))


def sign_foreign(wires: Iterable[dict[str, Any]]) -> None:
    """Sign the first call of answers that have no signature: Gemini refuses them else."""
    for wire in wires:
        calls = wire.get("tool_calls", ())
        if calls and not any(EXTRA in call for call in calls):
            calls[0].update(_FOREIGN)


def _known(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name in _FIELDS}


def _object(given: Any) -> dict[str, Any]:
    """Return an object: servers, and submitted conversations, may have anything in its place."""
    return given if isinstance(given, dict) else {}


def _has_more(call: dict[str, Any]) -> bool:
    """Return whether a call may have something besides what its protocol has."""
    name = call.get("id")
    is_long = isinstance(name, str) and len(name) > _SHORT_ID
    in_function = SPECIFIC in _object(call.get("function"))
    return is_long or in_function or EXTRA in call or SPECIFIC in call


def _of_call(call: dict[str, Any]) -> dict[str, Any]:
    name, signed = call.get("id"), _signature(call)
    kept: dict[str, Any] = {}
    if extra := _object(call.get(EXTRA)):
        kept[EXTRA] = extra
    if signed:
        kept[SPECIFIC] = signed
    in_name = any(one in name for one in signed.values()) if isinstance(name, str) else False
    if isinstance(name, str) and len(name) > _SHORT_ID and not in_name:
        kept["id"] = name
    return kept


def _signature(call: dict[str, Any]) -> dict[str, str]:
    """Return LiteLLM's signature of a call; it may stand in its function."""
    for fields in (call.get(SPECIFIC), _object(call.get("function")).get(SPECIFIC)):
        for field in _SIGNATURES:
            if isinstance(given := _object(fields).get(field), str) and given:
                return {field: given}
    return {}


def _of_message(message: Mapping[str, Any], calls: list[dict[str, Any]]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    if extra := _object(message.get(EXTRA)):
        kept[EXTRA] = extra
    if isinstance(phase := message.get(PHASE), str) and phase:
        kept[PHASE] = phase
    given = _object(message.get(SPECIFIC)).get("thought_signatures")
    own = {one for call in calls for one in _signature(call).values()}  # listed once more
    listed = given if isinstance(given, list) else []
    if signatures := [one for one in listed if isinstance(one, str) and one not in own]:
        kept[SPECIFIC] = {"thought_signatures": signatures}
    thoughts = message.get(THOUGHTS)
    if isinstance(thoughts, list) and all(isinstance(one, dict) for one in thoughts) and thoughts:
        kept[THOUGHTS] = thoughts
    return kept


def _reasoning(message: Mapping[str, Any]) -> dict[str, str]:
    """Return the field of an answer's reasoning under the name that its server has for it."""
    given = {name: message[name] for name in REASONING_FIELDS if _is_text(message.get(name))}
    name = next((name for name, text in given.items() if text), next(iter(given), ""))
    return {name: given[name]} if name else {}


def _is_text(value: Any) -> bool:
    return isinstance(value, str)
