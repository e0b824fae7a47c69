"""One line of a batch file to a value. Pure: bytes in; what is wrong names the field and the fix.

Knows neither files nor agents: whether an agent exists and takes the overrides is decided later.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from pydantic import ValidationError

from stepfleet.orchestrator.agents.prompt import names_shown, worded
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.models.media import normalized
from stepfleet.orchestrator.protocol.fold import check_data, check_places, places_of
from stepfleet.orchestrator.records import exact_json
from stepfleet.orchestrator.records.calls.tools import ToolCall
from stepfleet.orchestrator.records.conversation.messages import Message
from stepfleet.orchestrator.records.text.validation import explain_invalid, meant
from stepfleet.orchestrator.tools import parse_tool_call
from stepfleet.orchestrator.tools.schemas.bounded_json import check_nesting

INPUT_LIMIT = 1024 * 1024
METADATA_LIMIT = 64 * 1024
ID_LIMIT = 512
OWN_FIELDS = ("id", "input", "agent", "metadata", "overrides", "tenant")
ORDER_FIELDS = ("after", "after_failed")
FIELDS = (*OWN_FIELDS, *ORDER_FIELDS)
MOST_BEFORE = 1_000
"""Runs that one run waits for."""
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}")
_NO_NUMBER = re.compile(rb"[:,\[]\s*(-?(?:NaN|Infinity))\s*[,}\]]")
_IGNORED_OF_MESSAGES = frozenset({"refusal", "audio", "annotations", "reasoning", "function_call"})

AfterFailed = Literal["stop", "run"]
LineFormat = Literal["stepfleet", "openai"]


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One line's request.

    `model`, `tools` and `extra_body` (fields that only the provider knows) are what an OpenAI
    line names; `agent` comes from lines of our own format. `after` are
    ids of lines before it, and `template` its input where that has places for their results.
    """

    line_id: str | None
    messages: tuple[Message, ...]
    agent: str | None = None
    tenant: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    overrides: dict[str, Any] = field(default_factory=dict)
    model: str | None = None
    tools: tuple[str, ...] = ()
    extra_body: dict[str, Any] = field(default_factory=dict)
    after: tuple[str, ...] = ()
    after_failed: AfterFailed = "stop"
    template: str | None = None


def read_object(raw: bytes) -> dict[str, Any]:
    """Return a line's JSON object. Raises `ConfigurationError`."""
    try:
        data = exact_json.loads_as_written(raw)
    except json.JSONDecodeError as error:
        msg = f"is not valid JSON ({error.msg} at column {error.colno}); write one object per line"
        if number := _NO_NUMBER.search(raw):
            word = number.group(1).decode()
            msg = f"is not valid JSON: it does not have {word}; write null, or text"
        raise ConfigurationError(msg) from None
    if not isinstance(data, dict):
        msg = f'is {_kind(data)}, not an object; write {{"id": "1", "input": "..."}}'
        raise ConfigurationError(msg)
    for name, value in data.items():
        if isinstance(value, dict | list):
            check_nesting(value, name)
    return data


def format_of(data: Mapping[str, Any]) -> LineFormat:
    """Return which of the two formats a line has."""
    is_request = "custom_id" in data or isinstance(data.get("body"), dict)
    return "openai" if is_request else "stepfleet"


def parse_line(data: dict[str, Any], prompt: str | None = None) -> BatchLine:
    """Read a line of our own format for an agent with that `prompt`.

    Raises `ConfigurationError` that names the field.
    """
    unknown = [name for name in data if name not in FIELDS]
    if unknown:
        name = str(unknown[0])[:60]
        close = meant(name, FIELDS)
        msg = (
            f"field {name!r} is not known{f'{close} A' if close else '; a'} line has "
            f"{', '.join(FIELDS)}: put data of your own "
            "under 'metadata'. To run your own rows, give the agent a prompt that names their "
            f"fields, as Agent(..., prompt='... {{{name}}}'), or name the field to send "
            f"(--input-field {name}, input_field={name!r})"
        )
        raise ConfigurationError(msg)
    if "input" not in data:
        raise ConfigurationError("field 'input' is missing; write the question or task there")
    after, given = parse_after(data.get("after")), data["input"]
    if after:
        check_data(given, places_of(after))
    template = given if after and isinstance(given, str) else None
    if template is not None:
        check_places(template, places_of(after), required=False)
        input_of(template, "input", prompt)
    return BatchLine(
        line_id=parse_id(data.get("id"), "id"),
        after=after,
        after_failed=one_of(data.get("after_failed", "stop"), "after_failed", AfterFailed),
        template=template,
        messages=input_of(given, "input", None if template else prompt, data),
        agent=agent_named(data),
        tenant=parse_tenant(data.get("tenant")),
        metadata=parse_metadata(data.get("metadata")),
        overrides=_object(data.get("overrides"), "overrides"),
    )


def parse_after(value: Any) -> tuple[str, ...]:
    """Return the ids of lines that are to end before this one begins."""
    if value is None:
        return ()
    if not isinstance(value, str | int | list):
        msg = f"field 'after' is {_kind(value)}; write a list of ids of lines above, as"
        raise ConfigurationError(f'{msg} ["a", "b"]')
    ids = [parse_id(one, "after") for one in (value if isinstance(value, list) else [value])]
    check_before(len(ids))
    known: set[str | None] = {None}
    for one in ids:
        if one in known:
            raise ConfigurationError(f"field 'after' has {one!r} twice; name each line once")
        known.add(one)
    return tuple(one for one in ids if one)


def one_of(value: Any, name: str, words: Any) -> Any:
    """Return one of the words of a `Literal`. Raises `ConfigurationError` for anything else."""
    if value in get_args(words):
        return value
    *some, last = map(repr, get_args(words))
    msg = f"field {name!r} is {ascii(value)[:70]}; write {', '.join(some)} or {last}"
    raise ConfigurationError(msg)


def check_before(count: int) -> None:
    """Raise `ConfigurationError` unless a run may wait for that many."""
    if not 1 <= count <= MOST_BEFORE:
        msg = f"field 'after' names {count:,} runs; name 1 to {MOST_BEFORE:,}"
        raise ConfigurationError(f"{msg}, or let them follow each other")


def agent_named(data: Mapping[str, Any]) -> str | None:
    """Return the agent that a line names, if any."""
    agent = data.get("agent")
    if agent is not None and not (isinstance(agent, str) and agent):
        raise ConfigurationError(f"field 'agent' is {_kind(agent)}; write an agent's name")
    return agent


def input_of(
    value: Any, name: str, prompt: str | None = None, line: Mapping[str, Any] | None = None
) -> tuple[Message, ...]:
    """Return an input as messages: text, a conversation, or a dict.

    An agent's `prompt` words a dict by its fields, and text as the field `input` next to the
    others of its `line`. Without a prompt a dict is sent as JSON. A conversation is sent as it is.
    """
    if isinstance(value, dict):
        check_nesting(value, name)
        if prompt is None and value.keys() >= {"role", "content"}:
            raise ConfigurationError(f"field {name!r} is one message; write a list of messages")
        text = exact_json.text(value) if prompt is None else worded(prompt, value)
        return parse_input(text, name)
    if prompt is not None and isinstance(value, str):
        return parse_input(worded(prompt, line or {name: value}), name)
    return parse_input(value, name)


def parse_id(value: Any, name: str) -> str | None:
    """Return a line's id: text or a whole number."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise ConfigurationError(f"field {name!r} is {_kind(value)}; write text or a whole number")
    if len(str(value)) > ID_LIMIT:
        raise ConfigurationError(f"field {name!r} is longer than {ID_LIMIT} characters; shorten it")
    return str(value)


def parse_tenant(value: Any) -> str | None:
    """Return the name of a tenant. Raises `ConfigurationError` for other text."""
    if value is None or (isinstance(value, str) and _TENANT.fullmatch(value)):
        return value
    msg = (
        f"field 'tenant' is {ascii(value)[:70]}; write 1 to 64 letters, digits and the "
        "signs . _ @ -, beginning with a letter or digit"
    )
    raise ConfigurationError(msg)


def parse_input(value: Any, name: str) -> tuple[Message, ...]:
    """Return an input, text or a list of messages, as messages.

    Raises `ConfigurationError` that names the field, also above 1 MiB.
    """
    if isinstance(value, str):
        if not value.strip():
            raise ConfigurationError(f"field {name!r} is empty; write the question or task there")
        try:
            size = len(value.encode())
        except UnicodeEncodeError:
            msg = f"field {name!r} holds a lone surrogate, which is not valid Unicode; leave it out"
            raise ConfigurationError(msg) from None
        check_size(size, INPUT_LIMIT, name)
        return (Message.user(value),)
    if not isinstance(value, list) or not value:
        msg = f"field {name!r} is {_kind(value)}; write text, a list of messages, or a dict"
        raise ConfigurationError(msg)
    check_nesting(value, name)
    value = stored_form(value, INPUT_LIMIT, name)
    return tuple(_message(one, f"{name}.{index}") for index, one in enumerate(value))


def parse_metadata(value: Any) -> dict[str, Any]:
    """Return a run's metadata, a JSON object of at most 64 KiB."""
    if not (metadata := _object(value, "metadata")):
        return {}
    check_nesting(metadata, "metadata")
    stored: dict[str, Any] = stored_form(metadata, METADATA_LIMIT, "metadata")
    return stored


def check_size(size: int, limit: int, name: str) -> None:
    """Raise `ConfigurationError` when a field has more bytes than it may have."""
    if size > limit:
        msg = (
            f"field {name!r} has {size:,} bytes; the limit is {limit:,} "
            f"({limit // 1024:,} KiB): shorten it, or pass a reference that a tool reads"
        )
        raise ConfigurationError(msg)


def stored_form(value: Any, limit: int, name: str) -> Any:
    """Return a value as it is stored: dates as text, NaN as null."""
    try:
        text = exact_json.dumps(value, default=exact_json.json_form)
    except TypeError as error:
        msg = f"field {name!r} is not valid JSON data ({error}); give text, numbers, lists, dicts"
        raise ConfigurationError(msg) from None
    check_size(len(text), limit, name)
    return exact_json.loads(text)


def _message(value: Any, name: str) -> Message:
    if not isinstance(value, dict):
        msg = f'field {name!r} is {_kind(value)}; write {{"role": "user", "content": "..."}}'
        raise ConfigurationError(msg)
    fields = {key: one for key, one in value.items() if key not in _IGNORED_OF_MESSAGES}
    if fields.get("content") is None:
        fields["content"] = ""
    calls = fields.pop("tool_calls", None)
    if calls:
        fields["tool_calls"] = _calls(calls, f"{name}.tool_calls")
    try:
        message = Message.model_validate(fields)
        return message.model_copy(update={"content": normalized(message.content)})
    except ValidationError as error:
        raise ConfigurationError(f"field {name!r}: {explain_invalid(error)}") from None
    except ValueError as error:
        raise ConfigurationError(f"field {name!r}: {error}") from None


def _calls(value: Any, name: str) -> tuple[ToolCall, ...]:
    """Read tool calls in our form, or in the provider's with arguments as JSON text."""
    if not isinstance(value, list):
        raise ConfigurationError(f"field {name!r} is {_kind(value)}; write a list of calls")
    calls = tuple(parse_tool_call(one, new_id=str) for one in value)
    for call in calls:
        if call.error or not call.id:
            why = call.error or "a call has no id; give each the id that its answer names"
            raise ConfigurationError(f"field {name!r}: {why}")
    return calls


def _object(value: Any, name: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigurationError(f"field {name!r} is {_kind(value)}; write an object")
    return value


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, str):
        return "text" if value else "empty text"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    return "an object"


KEPT_VALUE = 200
"""Bytes of the JSON of one field that a row's run keeps as metadata."""
KEPT = 4096
"""Bytes of all that it keeps."""


@dataclass(frozen=True, slots=True)
class RowRules:
    """How the objects of a batch are read.

    With an `input_field` or an `id_field` each of them is a row. `is_table`: a further column is
    no misspelled field of a line.
    """

    input_field: str | None = None
    id_field: str | None = None
    is_table: bool = False

    @property
    def names_fields(self) -> bool:
        """Whether a field of the objects is named."""
        return self.input_field is not None or self.id_field is not None

    def format_of(self, data: Mapping[str, Any]) -> LineFormat:
        """Return which format an object has: our rows, or OpenAI's requests."""
        return "stepfleet" if self.names_fields or self.is_table else format_of(data)

    def agent_of(self, data: Mapping[str, Any]) -> str | None:
        """Return the agent that a line names; a row's own field `agent` names none."""
        return None if self._is_row(data) else agent_named(data)

    def line_of(self, data: dict[str, Any], prompt: str | None) -> BatchLine:
        """Return a run's request. Raises `ConfigurationError` that names field and fix."""
        is_row = self._is_row(data) or (prompt is not None and "input" not in data)
        if not is_row or (prompt is None and not self.names_fields and not self.is_table):
            return parse_line(data, prompt)
        return BatchLine(
            line_id=self._id(data), messages=self._input(data, prompt), metadata=kept_of(data)
        )

    def _is_row(self, data: Mapping[str, Any]) -> bool:
        known = OWN_FIELDS if self.is_table else FIELDS
        return self.names_fields or not data.keys() <= set(known)

    def _id(self, data: Mapping[str, Any]) -> str | None:
        name = self.id_field or "id"
        if self.id_field is not None and data.get(name) is None:
            found = "is null" if name in data else f"is missing; there are: {names_shown(data)}"
            raise ConfigurationError(f"field {name!r}, which is to be the id, {found}")
        return parse_id(data.get(name), name)

    def _input(self, data: dict[str, Any], prompt: str | None) -> tuple[Message, ...]:
        name = self.input_field or "input"
        if name not in data and (prompt is None or self.input_field is not None):
            raise ConfigurationError(
                f"field {name!r}, which is to be the input, is missing; there are: "
                f"{names_shown(data)}. Name one of them (--input-field, input_field=), or give the "
                "agent a prompt that does, as Agent(..., prompt='Classify: {description}')"
            )
        if prompt is not None:
            fields = {**data, "input": data[name]} if name in data else data
            return parse_input(worded(prompt, fields), "input")
        value = data[name]
        if isinstance(value, int | float):
            value = exact_json.text(value)
        return input_of(value, name)


def kept_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that a row's run keeps: short ones, in their order, up to 4 KiB."""
    kept = {}
    left = KEPT
    for name, value in row.items():
        if isinstance(value, str | list | dict) and len(value) > KEPT_VALUE:
            continue
        size = len(exact_json.dumps(value))
        left -= len(name.encode()) + size if size <= KEPT_VALUE else 0
        if left < 0:
            break
        if size <= KEPT_VALUE:
            kept[name] = value
    return kept
