"""The two answer tools as a model is told of them."""

from typing import Any

import jsonschema
import pytest
from pydantic import BaseModel

from stepfleet.orchestrator.agents.answers.definitions import final_answer, structured_response
from stepfleet.orchestrator.tools.schemas.handles import schema_of


class Item(BaseModel):
    name: str


class Order(BaseModel):
    items: list[Item]
    best: Item | None = None


class Tree(BaseModel):
    children: list["Tree"] = []


def test_final_answer_takes_a_text_and_may_take_data_and_remarks() -> None:
    """ANS-01"""
    assert final_answer(None).spec.to_dict() == {
        "name": "final_answer",
        "description": "Gives the final answer and ends the task. Call it alone, once.",
        "parameters": {
            "type": "object",
            "properties": {
                "answer": {
                    "type": "string",
                    "description": "The final answer, complete and not empty.",
                },
                "structured": {
                    "type": "object",
                    "description": "Data that belongs to the answer.",
                },
                "meta": {
                    "type": "object",
                    "description": "Remarks on the answer, such as sources.",
                },
            },
            "required": ["answer"],
            "additionalProperties": False,
        },
    }


def test_structured_response_embeds_the_schema_and_forbids_more_at_both_levels() -> None:
    """ANS-02"""
    parameters = structured_response(schema_of(Order)).spec.parameters
    item = {
        "type": "object",
        "title": "Item",
        "properties": {"name": {"type": "string"}},
        "required": ["name"],
    }
    assert parameters == {
        "type": "object",
        "properties": {
            "structured": {
                "type": "object",
                "title": "Order",
                "properties": {
                    "items": {"type": "array", "items": {"$ref": "#/$defs/Item"}},
                    "best": {
                        "anyOf": [{"$ref": "#/$defs/Item"}, {"type": "null"}],
                        "default": None,
                    },
                },
                "required": ["items"],
                "additionalProperties": False,
            }
        },
        "required": ["structured"],
        "additionalProperties": False,
        "$defs": {"Item": item},
    }


REFERRING = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"$ref": "#/properties/a"}},
}
WHOLE = {"type": "object", "properties": {"a": {"type": "integer"}, "again": {"$ref": "#"}}}


@pytest.mark.parametrize(
    ("given", "good", "bad"),
    [
        (Order, {"items": [{"name": "a"}]}, {"items": [{"name": 1}]}),
        (Tree, {"children": [{"children": []}]}, {"children": [{"children": 1}]}),
        (REFERRING, {"a": 1, "b": 2}, {"a": 1, "b": "2"}),
        (WHOLE, {"again": {"a": 1}}, {"again": {"a": "1"}}),
        (
            {"definitions": {"n": {"type": "object", "properties": {}}}, "$ref": "#/definitions/n"},
            {},
            [],
        ),
    ],
)
def test_references_still_resolve_in_the_parameters(given: Any, good: Any, bad: Any) -> None:
    """ANS-02"""
    parameters = structured_response(schema_of(given)).spec.parameters
    validator = jsonschema.Draft7Validator(parameters)
    assert validator.is_valid({"structured": good})
    assert not validator.is_valid({"structured": bad})
