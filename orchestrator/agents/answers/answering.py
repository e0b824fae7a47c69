"""Handlers of `final_answer` and `structured_response`. Pure; reports go to a sink."""

from dataclasses import dataclass
from typing import Any

from stepfleet.orchestrator.agents.answers.sinks import ErrorSink
from stepfleet.orchestrator.agents.answers.special import (
    Continue,
    Outcome,
    ReturnAnswer,
    ReturnResult,
    invalid,
)
from stepfleet.orchestrator.errors import InvalidToolCallError
from stepfleet.orchestrator.records.state import AgentState
from stepfleet.orchestrator.records.tools import ToolCall
from stepfleet.orchestrator.tools.schemas.bounded_json import BoundsError, plain_json
from stepfleet.orchestrator.tools.schemas.handles import SchemaHandle

LARGEST = 256 * 1024
"""Bytes that an answer's data may have as JSON."""
AWAITED = "The answer is noted. Now call structured_response with its data."
TWICE = "the final answer was given already; call structured_response with its data"
BLANK = "answer: is blank; call it again with the answer as text"
NO_SCHEMA = "this task has no schema for structured data; call final_answer with the answer"


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
        return ReturnResult(data, text, self.schema.name if self.schema else None)

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
        return ReturnResult(data, schema_name=self.schema.name)


def problems_of_data(schema: SchemaHandle | None, data: Any) -> str | None:
    """Return the problems of an answer's data, or None."""
    try:
        plain = plain_json(data, limit=LARGEST)
    except BoundsError as error:
        return f"<root>: {error}"
    if not isinstance(plain, dict):
        return "<root>: must be a JSON object"
    return schema.problems(plain) if schema else None
