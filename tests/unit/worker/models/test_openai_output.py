"""The wire form of JSON output, and when a schema is of the kind that strict mode takes."""

from typing import Any

import pytest

from stepfleet.orchestrator import Message, ModelRequest
from stepfleet.orchestrator.records.responses import OutputFormat
from stepfleet.orchestrator.tools.schemas.handles import fits_strict_mode
from stepfleet.worker.models.openai.request import request_body, response_format

CLOSED: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}


def request(output: OutputFormat | None) -> ModelRequest:
    return ModelRequest(model="m", messages=(Message.user("hello"),), output=output)


def test_a_request_for_text_names_no_format() -> None:
    assert "response_format" not in request_body(request(None), official=True)


def test_a_request_for_any_object_asks_for_json() -> None:
    """ANS-17"""
    body = request_body(request(OutputFormat()), official=True)
    assert body["response_format"] == {"type": "json_object"}


def test_a_request_with_a_schema_names_it() -> None:
    """ANS-17"""
    assert response_format(OutputFormat(name="A city!", json_schema=CLOSED)) == {
        "type": "json_schema",
        "json_schema": {"name": "A_city_", "schema": CLOSED, "strict": True},
    }


@pytest.mark.parametrize(
    ("schema", "strict"),
    [
        (CLOSED, True),
        ({**CLOSED, "required": []}, False),
        ({**CLOSED, "additionalProperties": True}, False),
        ({**CLOSED, "properties": {"a": {"type": "string", "pattern": "^x"}}}, False),
        ({**CLOSED, "properties": {"a": {"type": "array", "items": CLOSED}}}, True),
        ({**CLOSED, "properties": {"a": {"type": "array", "items": {"type": "object"}}}}, False),
        ({**CLOSED, "properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": CLOSED}}, True),
        ({**CLOSED, "properties": {"a": {"anyOf": [CLOSED, {"type": "null"}]}}}, True),
        (
            {**CLOSED, "properties": {"a": {"anyOf": [{"type": "object", "minProperties": 1}]}}},
            False,
        ),
        ({"anyOf": [CLOSED]}, False),
    ],
)
def test_strict_mode_takes_closed_objects_that_require_every_property(
    schema: dict[str, Any], strict: bool
) -> None:
    """ANS-17"""
    assert fits_strict_mode(schema) is strict
