"""Special tools, which end a run with an answer or steer it, and sinks of their reports. Pure."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol

from stepfleet.orchestrator.errors import (
    AgentException,
    ConfigurationError,
    InvalidToolCallError,
    ToolArgumentsError,
    ToolExecutionError,
)
from stepfleet.orchestrator.records.calls.tools import ToolCall, ToolCallRecord, ToolSpec, refused
from stepfleet.orchestrator.records.conversation.messages import Message, result_text
from stepfleet.orchestrator.records.errors import ErrorInfo
from stepfleet.orchestrator.records.state import AgentState
from stepfleet.orchestrator.records.text.redaction import redact
from stepfleet.orchestrator.records.text.tracebacks import traceback_of
from stepfleet.orchestrator.tools.schemas.bounded_json import (
    BoundsError,
    canonical_json,
    plain_json,
)
from stepfleet.orchestrator.tools.schemas.handles import Schema, SchemaHandle, changed, handle_of


class ErrorSink(Protocol):
    """Receives reports about calls, for the model to read; the last report of a call counts."""

    def report_error(self, call: ToolCall, error: ErrorInfo) -> None:
        """Report that the call was wrong, and why."""

    def report_observation(self, call: ToolCall, result: Any) -> None:
        """Report the result of the call: text or JSON data."""


class RecordsSink:
    """Keeps a record per call id, for a step's log. `at` is the UTC time that they get."""

    def __init__(self, at: datetime) -> None:
        self.at = at
        self.records: dict[str, ToolCallRecord] = {}

    def report_error(self, call: ToolCall, error: ErrorInfo) -> None:
        """Keep an error record."""
        self.records[call.id] = refused(
            call, self.at, error_type=error.type, code=error.code, message=error.message
        ).model_copy(update={"error": _of_call(error, call)})

    def report_observation(self, call: ToolCall, result: Any) -> None:
        """Keep a record with that result."""
        self.records[call.id] = ToolCallRecord(
            tool_name=call.name,
            call_id=call.id,
            arguments=call.arguments,
            result=result,
            duration_ms=0.0,
            timestamp=self.at,
        )


class MessagesSink(RecordsSink):
    """Keeps a tool message per call id, for a conversation that is held in messages alone."""

    def __init__(self) -> None:
        super().__init__(datetime.min.replace(tzinfo=UTC))  # messages have no time

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages, in the order of the calls' first reports."""
        return tuple(
            Message.tool(ToolCall(id=one.call_id, name=one.tool_name), result_text(one))
            for one in self.records.values()
        )


def _of_call(error: ErrorInfo, call: ToolCall) -> ErrorInfo:
    return error.model_copy(update={"tool_name": call.name, "call_id": call.id})


NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_LONGEST = 2000


@dataclass(frozen=True, slots=True)
class Continue:
    """The run goes on. `pending` is an answer's text whose data is still awaited."""

    pending: str | None = None


@dataclass(frozen=True, slots=True)
class ReturnAnswer:
    """The run ends with `text`."""

    text: str


@dataclass(frozen=True, slots=True)
class ReturnResult:
    """The run ends with data. `schema_name` names the schema that it was checked against.

    `text` None means the answer that was given before, or a default text.
    """

    structured: Any
    text: str | None = None
    schema_name: str | None = None


Outcome = Continue | ReturnAnswer | ReturnResult


class SpecialHandler(Protocol):
    """Decides the outcome of a special tool's call; its arguments fit the tool's parameters.

    Must be pure: a step that is repeated after a crash calls it again. The model reads an
    exception as an error of the call, and the run goes on.
    """

    def __call__(self, call: ToolCall, state: AgentState, sink: ErrorSink) -> Outcome:
        """Report to `sink` for the model to read, and return the outcome."""
        ...


@dataclass(frozen=True, kw_only=True)
class SpecialTool:
    """A tool whose call may end the run. It must be the only call of its turn.

    `parameters` is a JSON Schema of an object; `checked_as` one that arguments are checked
    against instead. Raises `ConfigurationError` that names the fix.
    """

    name: str
    description: str
    handler: SpecialHandler
    parameters: Mapping[str, Any] = field(default_factory=lambda: dict(NO_PARAMETERS))
    checked_as: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        """Refuse names and schemas that cannot work."""
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise ConfigurationError(
                f"special tool {self.name!r}: name must be 1 to 64 letters, digits, _ or -"
            )
        if not callable(self.handler):
            raise ConfigurationError(
                f"special tool {self.name!r}: handler must be a function of (call, state, sink)"
            )
        try:
            self._arguments()
        except ConfigurationError as error:
            raise ConfigurationError(f"special tool {self.name!r}: {error.message}") from None

    @property
    def spec(self) -> ToolSpec:
        """The tool as a model sees it."""
        return ToolSpec(
            name=self.name, description=self.description, parameters=dict(self.parameters)
        )

    def take(self, call: ToolCall, state: AgentState, sink: ErrorSink) -> Outcome:
        """Return the outcome of `call`; its errors are reported, never raised."""
        if call.error is not None:
            sink.report_error(call, InvalidToolCallError(call.error).to_info())
            return Continue()
        if problems := self._arguments().problems(call.arguments):
            sink.report_error(call, invalid(self.name, problems))
            return Continue()
        try:
            outcome: Any = self.handler(call, state, sink)
        except AgentException as error:
            sink.report_error(call, error.to_info())
            return Continue()
        except Exception as error:  # noqa: BLE001 - users write handlers; none may lose a step
            failed = _failed(f"{type(error).__name__}: {error}")
            sink.report_error(call, failed.model_copy(update={"traceback": traceback_of(error)}))
            return Continue()
        if not isinstance(outcome, Continue | ReturnAnswer | ReturnResult):
            kind = type(outcome).__name__
            sink.report_error(
                call, _failed(f"its handler returned a {kind}, not Continue, ReturnAnswer or ...")
            )
            return Continue()
        return outcome

    def _arguments(self) -> SchemaHandle:
        return handle_of(self.parameters if self.checked_as is None else self.checked_as)


def invalid(tool: str, problems: str) -> ErrorInfo:
    """Return the error of a call with wrong arguments or data; the model can correct it."""
    return ToolArgumentsError(f"{tool}: {problems}").to_info()


def _failed(message: str) -> ErrorInfo:
    return ToolExecutionError(redact(message[:_LONGEST])).to_info()


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
class FinalAnswerHandler:
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
class StructuredResponseHandler:
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
        handler=FinalAnswerHandler(schema),
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
        handler=StructuredResponseHandler(schema),
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
    """Return the reply to a message that is not a valid answer."""
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
