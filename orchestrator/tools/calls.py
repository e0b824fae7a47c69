"""The one parser of tool calls, in every shape that models and SDKs give them.

Decides whether a call is well-formed; a bad one becomes a `ToolCall` with its `error`, never an
exception. Knows no tools: whether the name exists and the arguments fit is decided elsewhere.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from stepfleet.orchestrator.records.calls.tools import ToolCall
from stepfleet.orchestrator.tools.schemas.bounded_json import (
    MAX_SIZE,
    BoundsError,
    canonical_json,
    is_unicode,
    load_bounded,
    plain_json,
)

UNKNOWN = "unknown"
"""The name of a call that has none."""

MOST_CALLS = 256
"""So many calls of one answer are executed; one more reports the limit, others are dropped."""

LONGEST_TOOL = 200
LONGEST_ID = 512
_EXCERPT = 80


def parse_tool_call(
    raw: Any, *, new_id: Callable[[], str], max_arguments: int = MAX_SIZE
) -> ToolCall:
    """Return the call of `raw`; `error` is set where it cannot be executed.

    `raw` is a `ToolCall`, an object with `.function` (itself an object or a dict), a dict with
    or without a nested `function`, or an object with `.name` and `.arguments`. Arguments are
    JSON text or a mapping; none at all, or `null`, means `{}`. A missing id is taken from `new_id`.
    `max_arguments` is in bytes.
    """
    call_id = _call_id(_field(raw, "id")) or new_id()
    if isinstance(raw, ToolCall) and raw.error is not None:
        return raw.model_copy(update={"id": call_id})
    function = _field(raw, "function")
    source = raw if function is None else function
    name, problem = _name(_field(source, "name"))
    if problem is None:
        try:
            arguments = _arguments(_field(source, "arguments"), max_arguments)
        except BoundsError as error:
            problem = f"the arguments of the call to {name!r} cannot be used: {error}"
        else:
            return ToolCall.model_construct(id=call_id, name=name, arguments=arguments)
    return ToolCall(id=call_id, name=name, error=problem)


def parse_tool_calls(raw: Sequence[Any], *, new_id: Callable[[], str]) -> tuple[ToolCall, ...]:
    """Return the calls of one answer, as many as `bounded_calls` leaves.

    Calls that share an id get ids of their own: some servers number the calls of every answer
    alike, or all of one answer the same.
    """
    calls: dict[str, ToolCall] = {}
    for one in raw[: MOST_CALLS + 1]:
        call = parse_tool_call(one, new_id=new_id)
        if call.id in calls:
            call = call.model_copy(update={"id": new_id()})
        calls[call.id] = call
    return bounded_calls(tuple(calls.values()))


def bounded_calls(calls: tuple[ToolCall, ...]) -> tuple[ToolCall, ...]:
    """Return at most `MOST_CALLS` of the calls, followed by one that reports the others.

    That one is never executed and answered with its error. The others are left out of the
    conversation, so that every call in it has a result.
    """
    if len(calls) <= MOST_CALLS:
        return calls
    return (*calls[:MOST_CALLS], _surplus(calls[MOST_CALLS]))


def _surplus(call: ToolCall) -> ToolCall:
    error = (
        f"the answer asked for more than {MOST_CALLS} tool calls; this call and all after it "
        f"were not executed: ask for them again, at most {MOST_CALLS} at a time"
    )
    return ToolCall(id=call.id, name=call.name, error=error)


def drop_leaked_arguments(text: str, calls: Iterable[ToolCall]) -> str:
    """Return `text`, or "" where it is nothing but the JSON arguments of one of `calls`."""
    stripped = text.strip()
    if not stripped.startswith("{"):
        return text
    try:
        leaked = load_bounded(stripped)
    except BoundsError:
        return text
    return "" if any(_are_same(leaked, call) for call in calls) else text


def _are_same(leaked: Any, call: ToolCall) -> bool:
    """Compare the values first, which is fast; equal ones may still be 1 and true."""
    if leaked != call.arguments:
        return False
    try:
        return canonical_json(leaked) == canonical_json(plain_json(call.arguments))
    except BoundsError:
        return False


def _field(source: Any, name: str) -> Any:
    if isinstance(source, Mapping):
        return source.get(name)
    return getattr(source, name, None)


def _call_id(given: Any) -> str | None:
    if isinstance(given, bool) or not isinstance(given, str | int):
        return None
    try:
        text = str(given)
    except ValueError:  # an integer of too many digits
        return None
    return text if is_call_id(text) else None


def is_call_id(text: str) -> bool:
    """Return whether a call can have this id: one with a character, and at most 512."""
    return bool(text.strip()) and len(text) <= LONGEST_ID and _clean(text)


def _name(given: Any) -> tuple[str, str | None]:
    if given is None or (isinstance(given, str) and not given.strip()):
        return UNKNOWN, "the call names no tool; give the name of one of the tools on offer"
    if not isinstance(given, str):
        kind = type(given).__name__
        return UNKNOWN, f"the name of the call's tool must be text, and is of type {kind}"
    name = given.strip()
    if len(name) > LONGEST_TOOL or not _clean(name):
        return UNKNOWN, (
            f"the name of the call's tool is not a valid name (at most {LONGEST_TOOL} characters, "
            f"no NUL, valid Unicode)"
        )
    return name, None


def _clean(text: str) -> bool:
    return "\x00" not in text and is_unicode(text)


def _arguments(given: Any, limit: int) -> dict[str, Any]:
    if given is None or (isinstance(given, str) and given.strip() in ("", "null")):
        return {}
    if isinstance(given, str):
        try:
            value = load_bounded(given, limit=limit)
        except BoundsError as error:
            raise BoundsError(f"{error}; got {_excerpt(given)}") from None
    elif isinstance(given, Mapping):
        value = plain_json(given, limit=limit)
    else:
        kind = type(given).__name__
        raise BoundsError(f"they must be a JSON object, and are of type {kind}")
    if not isinstance(value, dict):
        raise BoundsError(f"they must be a JSON object; got {_excerpt(str(given))}")
    return value


def _excerpt(text: str) -> str:
    return ascii(text[:_EXCERPT]) + ("..." if len(text) > _EXCERPT else "")
