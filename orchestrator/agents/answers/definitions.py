"""The built-in special tools `final_answer` and `structured_response`, and their instructions.

Pure; reports go to a sink.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stepfleet.orchestrator.agents.answers.sinks import ErrorSink
from stepfleet.orchestrator.agents.answers.special import (
    Continue,
    Outcome,
    ReturnAnswer,
    ReturnResult,
    SpecialTool,
    invalid,
)
from stepfleet.orchestrator.errors import InvalidToolCallError
from stepfleet.orchestrator.records.calls.tools import ToolCall
from stepfleet.orchestrator.records.state import AgentState
from stepfleet.orchestrator.tools.schemas.bounded_json import (
    BoundsError,
    canonical_json,
    plain_json,
)
from stepfleet.orchestrator.tools.schemas.handles import Schema, SchemaHandle, changed

LARGEST = 256 * 1024
"""Bytes that an answer's data may have as JSON."""
AWAITED = "The answer is noted. Now call structured_response with its data."
TWICE = "the final answer was given already; call structured_response with its data"
BLANK = "answer: is blank; call it again with the answer as text"
NO_SCHEMA = "this task has no schema for structured data; call final_answer with the answer"
FINAL_ANSWER = "final_answer"
STRUCTURED_RESPONSE = "structured_response"

_SHARED = ("$defs", "definitions")
_OBJECT_OR_NULL: Mapping[str, Any] = {"type": ["object", "null"]}
_ENVELOPE: Mapping[str, Any] = {
    "type": "object",
    "properties": {"structured": {}},
    "required": ["structured"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class FinalAnswer:
    """Takes the answer's text: it ends the run, unless data is still awaited."""

    schema: SchemaHandle | None

    def __call__(self, call: ToolCall, state: AgentState, sink: ErrorSink) -> Outcome:
        """Return the outcome of the call."""
        if state.answer is not None and state.answer.text is not None:
            sink.report_error(call, invalid(call.name, TWICE))
            return Continue()
        text: str = call.arguments["answer"]
        data = call.arguments.get("structured")
        if not text.strip():
            sink.report_error(call, invalid(call.name, BLANK))
            return Continue()
        if data is None:
            return self._without_data(call, text, sink)
        if problems := problems_of_data(self.schema, data):
            sink.report_error(call, invalid(f"{call.name}, field structured", problems))
            return Continue()
        if self.schema is None:
            return ReturnResult(data, text)
        return ReturnResult(self.schema.answer(data), text, self.schema.type_name)

    def _without_data(self, call: ToolCall, text: str, sink: ErrorSink) -> Outcome:
        if self.schema is None:
            return ReturnAnswer(text)
        sink.report_observation(call, AWAITED)
        return Continue(pending=text)


@dataclass(frozen=True)
class StructuredResponse:
    """Takes the answer's data: it ends the run where it fits the schema."""

    schema: SchemaHandle | None

    def __call__(self, call: ToolCall, state: AgentState, sink: ErrorSink) -> Outcome:  # noqa: ARG002
        """Return the outcome of the call."""
        if self.schema is None:
            sink.report_error(call, InvalidToolCallError(NO_SCHEMA).to_info())
            return Continue()
        data = call.arguments["structured"]
        if problems := problems_of_data(self.schema, data):
            sink.report_error(call, invalid(call.name, problems))
            return Continue()
        return ReturnResult(self.schema.answer(data), schema_name=self.schema.type_name)


def problems_of_data(schema: SchemaHandle | None, data: Any) -> str | None:
    """Return the problems of an answer's data, or None."""
    try:
        plain = plain_json(data, limit=LARGEST)
    except BoundsError as error:
        return f"<root>: {error}"
    if not isinstance(plain, dict):
        return "<root>: must be a JSON object"
    return schema.problems(plain) if schema else None


def final_answer(schema: SchemaHandle | None) -> SpecialTool:
    """Return the tool that takes the answer's text; `schema` is that of the data, if any."""
    properties: dict[str, Any] = {
        "answer": {"type": "string", "description": "The final answer, complete and not empty."},
        "structured": {"type": "object", "description": "Data that belongs to the answer."},
        "meta": {"type": "object", "description": "Remarks on the answer, such as sources."},
    }
    parameters = {
        "type": "object",
        "properties": properties,
        "required": ["answer"],
        "additionalProperties": False,
    }
    nullable = {"structured": _OBJECT_OR_NULL, "meta": _OBJECT_OR_NULL}
    return SpecialTool(
        name=FINAL_ANSWER,
        description="Gives the final answer and ends the task. Call it alone, once.",
        parameters=parameters,
        checked_as={**parameters, "properties": {**properties, **nullable}},
        handler=FinalAnswer(schema),
    )


def structured_response(schema: SchemaHandle | None) -> SpecialTool:
    """Return the tool that takes the answer's data, its schema embedded."""
    return SpecialTool(
        name=STRUCTURED_RESPONSE,
        description="Gives the answer as data that fits the schema and ends the task. "
        "Call it alone.",
        parameters=embedded(schema.schema) if schema else _ENVELOPE,
        # The handler checks the data, and names places in it from its own root.
        checked_as=_ENVELOPE if schema else {"type": "object"},
        handler=StructuredResponse(schema),
    )


def embedded(schema: Schema) -> Schema:
    """Return parameters whose `structured` has that schema, its references still resolving."""

    def moved(one: Schema) -> Schema:
        reference = one.get("$ref")
        if not isinstance(reference, str) or reference.startswith(
            tuple(f"#/{name}/" for name in _SHARED)
        ):
            return one
        return {**one, "$ref": f"#/properties/structured{reference.removeprefix('#')}"}

    whole = changed(schema, moved)
    inner = {key: one for key, one in whole.items() if key not in _SHARED}
    shared = {key: one for key, one in whole.items() if key in _SHARED}
    return {**_ENVELOPE, "properties": {"structured": inner}, **shared}


def paragraph(schema: SchemaHandle | None, *, native: bool) -> str:
    """Return the instructions for answers. `native`: as a message, not by a tool."""
    if schema and native:
        return (
            "Give your answer as one JSON object that fits this JSON Schema, and nothing else: "
            f"{canonical_json(schema.schema)}"
        )
    tool = STRUCTURED_RESPONSE if schema else FINAL_ANSWER
    content = "data that fits its schema" if schema else "your complete answer"
    return (
        f"When you have the answer, call the tool {tool} with {content}, alone in its turn. "
        "Text without that call is not taken as an answer."
    )


def reminder(schema: SchemaHandle | None) -> str:
    """Return the reply to text without a call."""
    tool = STRUCTURED_RESPONSE if schema else FINAL_ANSWER
    return (
        "That was not taken as an answer: text alone does not end the task. "
        f"Call {tool} to give your answer, or another tool to go on."
    )


def correction(problems: str) -> str:
    """Return the reply to a message that is no valid answer."""
    return (
        f"That was not taken as an answer: {problems}. "
        "Answer again with one JSON object that fits the schema, and nothing else."
    )


def mending(problems: str) -> str:
    """Return the reply to a message whose data does not fit, where a tool takes the answer."""
    return (
        f"That was not taken as an answer: {problems}. "
        f"Call {STRUCTURED_RESPONSE} with data that fits its schema."
    )


def text_in_place(schema: SchemaHandle | None) -> str:
    """Return why text in place of the answer's tool was refused, with the fix, for people."""
    if schema is None:
        return (
            f"text in place of a call of {FINAL_ANSWER}. Use a model that calls tools, or leave "
            "require_final_answer out"
        )
    return (
        f"text in place of a call of {STRUCTURED_RESPONSE}. Use a model that calls tools, or "
        "answer_mode='native'"
    )
