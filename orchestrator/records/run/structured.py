"""A result's structured data, read as the caller's own type. Knows no JSON Schema."""

import json
from typing import NoReturn, TypeVar

from pydantic import TypeAdapter, ValidationError

from stepfleet.orchestrator.records.run.facts import RunFacts
from stepfleet.orchestrator.records.run.raising import StructuredDataError
from stepfleet.orchestrator.records.text.validation import explain_invalid

T = TypeVar("T")


def read_structured(facts: RunFacts, expected: type[T]) -> T:
    """Return the structured data as an `expected`. Raises `StructuredDataError`.

    A type with a name is only read from data of the schema of that name.
    """
    if facts.structured is None:
        _refuse(facts, "field '<root>' holds no structured data")
    if facts.schema_name is None:
        _refuse(facts, "field 'schema_name' is not set: the run had no completion schema")
    name = getattr(expected, "__name__", facts.schema_name)
    is_plain = getattr(expected, "__module__", "") == "builtins"
    if not is_plain and name != facts.schema_name:
        _refuse(facts, f"field '<root>' has the schema {facts.schema_name!r}, not {name!r}")
    try:
        return TypeAdapter(expected).validate_json(json.dumps(facts.structured))
    except ValidationError as error:
        _refuse(facts, explain_invalid(error))


def _refuse(facts: RunFacts, why: str) -> NoReturn:
    raise StructuredDataError(f"structured data of run {facts.run_id}: {why}") from None
