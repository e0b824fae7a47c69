"""Makes answers of models fit to be stored: valid Unicode, within bounds.

An answer that cannot be written as JSON would be paid for and never committed.
"""

import hashlib
import logging
import uuid
from collections.abc import Iterable
from typing import Any

from pydantic_core import PydanticSerializationError, to_json

from stepfleet.orchestrator.errors import ModelError
from stepfleet.orchestrator.records import exact_json
from stepfleet.orchestrator.records.base import well_formed
from stepfleet.orchestrator.records.calls.tools import ToolCall
from stepfleet.orchestrator.records.conversation.messages import Block, Message
from stepfleet.orchestrator.records.responses import LLMResponse
from stepfleet.orchestrator.records.usage import bounded_usage
from stepfleet.orchestrator.tools import bounded_calls, parse_tool_call
from stepfleet.orchestrator.tools.calls import LONGEST_ID, LONGEST_TOOL, is_call_id
from stepfleet.orchestrator.tools.schemas.bounded_json import MAX_SIZE, is_too_deep, is_unicode

log = logging.getLogger(__name__)

_LENGTH = 9


LONGEST_NAME = 512
"""Characters of a model's name, and of a request's id; both are stored with each step."""
LARGEST_BLOCK = 1024 * 1024
"""Bytes of the JSON of a block of reasoning; four times as many of all blocks of an answer."""

_TEXTS = ("content", "model", "reasoning_text", "request_id")


def storable(response: LLMResponse, *, parsed: bool = False) -> LLMResponse:
    """Return the answer as it can be stored: the same object where nothing is wrong with it.

    Its texts are valid Unicode; blocks of reasoning that are too large, or nested deeper than 100
    levels, are left out. `parsed`: a format of ours has made it, with sound calls; any other one
    that cannot be stored raises `ModelError`.

    No text at all is an empty one.
    Of calls there are no more than a step executes; an error answers the surplus. Counts of
    tokens that cannot be are none.
    A call that is not valid is not repaired but answered with an error: its tool must not run with
    other arguments than the model gave.
    """
    changes = _within_bounds(response)
    if parsed:
        return response.model_copy(update=changes) if changes else response
    usage = bounded_usage(response.usage)
    if usage is not response.usage:
        changes["usage"] = usage
    calls = response.tool_calls or ()
    sound = tuple(map(_sound_call, bounded_calls(calls)))
    if len(sound) < len(calls) or any(
        one is not given for one, given in zip(sound, calls, strict=True)
    ):
        changes["tool_calls"] = sound
    made = response.model_copy(update=changes) if changes else response
    _check(made)
    return made


def _within_bounds(response: LLMResponse) -> dict[str, Any]:
    """Return the texts and the reasoning that cannot be stored as they are, repaired."""
    changes: dict[str, Any] = {}
    for name in _TEXTS:
        given = getattr(response, name)
        if given is None:
            changes[name] = ""
        elif given and isinstance(given, str) and (text := _sound_text(given)) is not given:
            changes[name] = text
    if len(response.model or "") > LONGEST_NAME:
        changes["model"] = ""  # the one that was asked
    if len(response.request_id or "") > LONGEST_NAME:
        changes["request_id"] = response.request_id[:LONGEST_NAME]
    if response.reasoning and (kept := _kept(response.reasoning)) != response.reasoning:
        changes["reasoning"] = kept
    return changes


def _check(response: LLMResponse) -> None:
    """Raise `ModelError` where an answer cannot be stored and read again."""
    try:
        text = response.model_dump_json(
            exclude_defaults=True, exclude_computed_fields=True, warnings=False
        )
        LLMResponse.from_json(text)
    except (ValueError, TypeError, AttributeError) as error:
        why = str(error).replace("\n", " ")[:300]
        raise ModelError(f"the model's answer cannot be stored: {why}") from None


def _sound_text(text: str) -> str:
    """Return valid Unicode: services send the halves of one character apart, or one alone."""
    if text.isascii() or is_unicode(text):
        return text
    return well_formed(text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass"))


def _kept(blocks: tuple[Block, ...]) -> tuple[Block, ...]:
    """Return the blocks of an answer's reasoning that are within bounds, as they can be stored."""
    kept: list[Block] = []
    left = 4 * LARGEST_BLOCK
    for block in blocks:
        if is_too_deep(block):
            log.warning("a block of reasoning is nested too deep, and left out")
            continue
        try:
            sound, size = _storable_data(block)
        except ValueError as error:
            log.warning("a block of reasoning cannot be stored, and is left out: %s", error)
            continue
        if size > min(left, LARGEST_BLOCK):
            log.warning("a block of reasoning has %d bytes of JSON, and is left out", size)
            continue
        left -= size
        kept.append(sound)
    return tuple(kept)


def _storable_data(block: Block) -> tuple[Block, int]:
    """Return a block without lone surrogates and NaN, and its bytes of JSON.

    Raises `ValueError` for what has no JSON form.
    """
    try:
        text = to_json(block)
    except PydanticSerializationError:
        block = _well_formed_data(block)
        text = to_json(block)
    if _has_constants(text):
        block = exact_json.loads(to_json(block, inf_nan_mode="null"))
    return block, len(text)


def _has_constants(text: bytes) -> bool:
    return b"NaN" in text or b"Infinity" in text


def _well_formed_data(value: Any) -> Any:
    if isinstance(value, str):
        return _sound_text(value)
    if isinstance(value, dict):
        return {_well_formed_data(key): _well_formed_data(one) for key, one in value.items()}
    return [_well_formed_data(one) for one in value] if isinstance(value, list) else value


def _sound_call(call: ToolCall) -> ToolCall:
    if not _is_sound(call):
        parsed = parse_tool_call(call, new_id=new_call_id)
        return ToolCall(
            id=parsed.id,
            name=well_formed(parsed.name),
            arguments={} if parsed.error else parsed.arguments,
            error=parsed.error and well_formed(parsed.error),
        )
    return call


def _is_sound(call: ToolCall) -> bool:
    if len(call.id) > LONGEST_ID or len(call.name) > LONGEST_TOOL or is_too_deep(call.arguments):
        return False
    try:
        text = call.to_json().encode()
    except PydanticSerializationError:
        return False
    return len(text) <= MAX_SIZE and not _has_constants(text)


def with_own_ids(response: LLMResponse, messages: Iterable[Message], number: int) -> LLMResponse:
    """Return the answer of step `number`, whose calls have ids that the run's others do not have.

    `messages` are the conversation before it. Some servers number the calls of every answer alike,
    and the response cache gives an answer again.
    """
    if not response.tool_calls:
        return response
    used = {call.id for message in messages for call in message.tool_calls}
    calls: list[ToolCall] = []
    for index, call in enumerate(response.tool_calls):
        name, tries = call.id, 0
        while name in used or not is_call_id(name):
            name, tries = own_id(number, index, tries), tries + 1
        used.add(name)
        calls.append(call if name == call.id else call.model_copy(update={"id": name}))
    if all(new is old for new, old in zip(calls, response.tool_calls, strict=True)):
        return response
    return response.model_copy(update={"tool_calls": tuple(calls)})


def own_id(*parts: object) -> str:
    """Return nine letters and digits, which every service takes: the same for the same parts."""
    named = "\0".join(map(str, parts)).encode(errors="backslashreplace")
    return hashlib.sha256(named).hexdigest()[:_LENGTH]


def new_call_id() -> str:
    """Return a new id for a tool call that has none."""
    return f"call_{uuid.uuid4().hex[:24]}"
