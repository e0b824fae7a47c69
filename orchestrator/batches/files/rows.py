"""Which input, id and metadata an object of a file gives its run. Pure.

An object with no other fields than those of a line is a line; any other is a row, whose fields are
the user's own. Knows an agent's prompt, not the agent.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stepfleet.orchestrator.agents.prompt import names_shown, worded
from stepfleet.orchestrator.batches.files.lines import (
    FIELDS,
    OWN_FIELDS,
    BatchLine,
    LineFormat,
    agent_named,
    format_of,
    input_of,
    parse_id,
    parse_input,
    parse_line,
)
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.records import exact_json
from stepfleet.orchestrator.records.conversation.messages import Message

KEPT_VALUE = 200
"""Bytes of the JSON of one field that a row's run keeps as metadata."""
KEPT = 4096
"""Bytes of all that it keeps."""


@dataclass(frozen=True, slots=True)
class RowRules:
    """How the objects of a batch are read.

    With an `input_field` or an `id_field` each of them is a row. `is_table`: a further column is
    no misspelled field of a line. `tenant` is that of objects that name none. `after` are runs that
    all of them wait for.
    """

    input_field: str | None = None
    id_field: str | None = None
    is_table: bool = False
    tenant: str | None = None
    after: tuple[str, ...] = ()

    @property
    def signature(self) -> list[str | None]:
        """What of the rules decides what the runs are given; empty for the usual ones."""
        fields = [self.input_field, self.id_field] if self._names_fields else []
        fields += [f"tenant {self.tenant}"] if self.tenant else []
        return [*fields, *(f"after {one}" for one in self.after)]

    def format_of(self, data: Mapping[str, Any]) -> LineFormat:
        """Return which format an object has: a row is no request of OpenAI's."""
        return "stepfleet" if self._names_fields or self.is_table else format_of(data)

    def agent_of(self, data: Mapping[str, Any]) -> str | None:
        """Return the agent that a line names; a row's own field `agent` names none."""
        return None if self._is_row(data) else agent_named(data)

    def line_of(self, data: dict[str, Any], prompt: str | None) -> BatchLine:
        """Return a run's request. Raises `ConfigurationError` that names field and fix."""
        is_row = self._is_row(data) or (prompt is not None and "input" not in data)
        if not is_row or (prompt is None and not self._names_fields and not self.is_table):
            return parse_line(data, prompt)
        return BatchLine(
            line_id=self._id(data), messages=self._input(data, prompt), metadata=kept_of(data)
        )

    @property
    def _names_fields(self) -> bool:
        return self.input_field is not None or self.id_field is not None

    def _is_row(self, data: Mapping[str, Any]) -> bool:
        known = OWN_FIELDS if self.is_table else FIELDS
        return self._names_fields or not data.keys() <= set(known)

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
