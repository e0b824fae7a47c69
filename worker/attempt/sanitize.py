"""Makes answers of custom models fit to be stored. Pure.

An answer that cannot be written as JSON would be paid for and never committed.
"""

import hashlib
import uuid
from collections.abc import Iterable
from typing import Any

from pydantic_core import PydanticSerializationError

from stepfleet.orchestrator.records.base import well_formed
from stepfleet.orchestrator.records.calls.tools import ToolCall
from stepfleet.orchestrator.records.conversation.messages import Message
from stepfleet.orchestrator.records.responses import LLMResponse
from stepfleet.orchestrator.records.usage import bounded_usage
from stepfleet.orchestrator.tools import bounded_calls, parse_tool_call
from stepfleet.orchestrator.tools.calls import is_call_id

_LENGTH = 9


def storable(response: LLMResponse) -> LLMResponse:
    """Return the answer with valid Unicode only: the same object where nothing is wrong with it.

    No text at all is an empty one.
    Of calls there are no more than a step executes; an error answers the surplus. Counts of
    tokens that cannot be are none.
    A call that is not valid is not mended but answered with an error: its tool must not run with
    other arguments than the model gave.
    """
    changes: dict[str, Any] = {}
    for name in ("content", "model", "reasoning_text", "request_id"):
        given = getattr(response, name)
        text = well_formed(given or "")
        if text != given:
            changes[name] = text
    usage = bounded_usage(response.usage)
    if usage is not response.usage:
        changes["usage"] = usage
    calls = response.tool_calls or ()
    sound = tuple(map(_sound_call, bounded_calls(calls)))
    if len(sound) < len(calls) or any(
        one is not given for one, given in zip(sound, calls, strict=True)
    ):
        changes["tool_calls"] = sound
    return response.model_copy(update=changes) if changes else response


def _sound_call(call: ToolCall) -> ToolCall:
    try:
        call.to_json()
    except PydanticSerializationError:
        parsed = parse_tool_call(call, new_id=new_call_id)
        return ToolCall(
            id=parsed.id,
            name=well_formed(parsed.name),
            arguments={} if parsed.error else parsed.arguments,
            error=parsed.error and well_formed(parsed.error),
        )
    return call


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
