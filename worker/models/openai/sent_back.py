"""What a service of chat completions must get back with an answer, besides the protocol's. Pure.

Gemini signs its calls; behind Google's endpoint the signature stands in `extra_content`, behind
LiteLLM in `provider_specific_fields` or in a long id, and Claude's thoughts in `thinking_blocks`.
They are kept as reasoning of the model that gave them, and no other model gets them.
"""

from collections.abc import Iterable
from typing import Any

from stepfleet.orchestrator.records.conversation.messages import Block, Message
from stepfleet.orchestrator.tools.calls import MOST_CALLS
from stepfleet.orchestrator.tools.schemas.bounded_json import BoundsError, plain_json
from stepfleet.worker.models.bodies import reasoning_block, reasoning_of

EXTRA, SPECIFIC, THOUGHTS = "extra_content", "provider_specific_fields", "thinking_blocks"
_FIELDS = frozenset({EXTRA, SPECIFIC, THOUGHTS})
MOST_KEPT = 256 * 1024
"""Bytes of what is kept of one answer."""
_SHORT_ID = 40
"""Characters of ids that every service takes."""
_FOREIGN = {EXTRA: {"google": {"thought_signature": "skip_thought_signature_validator"}}}
"""Google's word for calls that another model made: they have no signature."""


def model_at(service: str, model: str) -> str:
    """Return the name under which what a model of `service` gave is kept; "" for no service."""
    return service and f"{service}:{model}"


def kept_of(message: dict[str, Any], by: str) -> tuple[Block, ...]:
    """Return the block of what goes back with an answer; nothing where `by` is no model."""
    given = message.get("tool_calls")
    listed = given[: MOST_CALLS + 1] if isinstance(given, list) else []
    calls = [one if isinstance(one, dict) else {} for one in listed]
    found = {str(at): kept for at, call in enumerate(calls) if (kept := _of_call(call))}
    parts = {"message": _of_message(message, calls), "calls": found}
    data = {name: part for name, part in parts.items() if part}
    if not data or not by:
        return ()
    try:
        return (reasoning_block(by, 0, plain_json(data, limit=MOST_KEPT)),)
    except BoundsError:
        return ()  # nobody must get back so much: the service says what is missing


def add_extra(known: dict[str, Any], delta: dict[str, Any]) -> None:
    """Add what a piece of a stream has of it: fields of a later one win."""
    for name in (EXTRA, SPECIFIC):
        if isinstance(given := delta.get(name), dict):
            known[name] = {**known.get(name, {}), **given}


def give_back(wires: list[dict[str, Any]], messages: Iterable[Message], by: str) -> None:
    """Add to each answer what its model, `by`, is to get back; an answer is one message here."""
    answers = (message for message in messages if message.is_assistant())
    used: set[str] = set()
    names: dict[str, str] = {}
    for wire in wires:
        if wire["role"] == "tool":
            wire["tool_call_id"] = names.get(wire["tool_call_id"], wire["tool_call_id"])
        if wire["role"] != "assistant":
            continue
        calls: dict[str, Any] = {}
        for _, data in reasoning_of(next(answers), by):
            wire.update(_known(data.get("message")))
            calls = _object(data.get("calls"))
        for index, call in enumerate(wire.get("tool_calls", ())):
            kept = _object(calls.get(str(index)))
            name = kept.get("id")
            if isinstance(name, str) and name not in used:
                names[call["id"]] = name
                call["id"] = name
            call.update(_known(kept))
            used.add(call["id"])


def _known(given: Any) -> dict[str, Any]:
    return {name: value for name, value in _object(given).items() if name in _FIELDS}


def _object(given: Any) -> dict[str, Any]:
    """Return an object: a submitted conversation may have anything in its place."""
    return given if isinstance(given, dict) else {}


def sign_foreign(wires: Iterable[dict[str, Any]]) -> None:
    """Sign the first call of answers that have no signature: Gemini refuses them else."""
    for wire in wires:
        calls = wire.get("tool_calls", ())
        if calls and not any(EXTRA in call for call in calls):
            calls[0].update(_FOREIGN)


def _of_call(call: dict[str, Any]) -> dict[str, Any]:
    name, signature = call.get("id"), _signature(call)
    kept: dict[str, Any] = {}
    if isinstance(extra := call.get(EXTRA), dict) and extra:
        kept[EXTRA] = extra
    if signature:
        kept[SPECIFIC] = {"thought_signature": signature}
    if isinstance(name, str) and len(name) > _SHORT_ID and not (signature and signature in name):
        kept["id"] = name
    return kept


def _signature(call: dict[str, Any]) -> str:
    """Return LiteLLM's signature of a call; it may stand in its function."""
    function = call.get("function")
    inner = function.get(SPECIFIC) if isinstance(function, dict) else None
    for fields in (call.get(SPECIFIC), inner):
        signature = fields.get("thought_signature") if isinstance(fields, dict) else None
        if isinstance(signature, str) and signature:
            return signature
    return ""


def _of_message(message: dict[str, Any], calls: list[dict[str, Any]]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    if isinstance(extra := message.get(EXTRA), dict) and extra:
        kept[EXTRA] = extra
    specific = message.get(SPECIFIC)
    given = specific.get("thought_signatures") if isinstance(specific, dict) else None
    own = {_signature(call) for call in calls}  # LiteLLM lists them once more
    listed = given if isinstance(given, list) else []
    if signatures := [one for one in listed if isinstance(one, str) and one not in own]:
        kept[SPECIFIC] = {"thought_signatures": signatures}
    thoughts = message.get(THOUGHTS)
    if isinstance(thoughts, list) and all(isinstance(one, dict) for one in thoughts) and thoughts:
        kept[THOUGHTS] = thoughts
    return kept
