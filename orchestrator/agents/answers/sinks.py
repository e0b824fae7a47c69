"""Sinks for the reports of special tools: records of a step, or messages of a conversation.

One handler serves both; the model reads the same text.
"""

from datetime import UTC, datetime
from typing import Any, Protocol

from stepfleet.orchestrator.records.calls.tools import ToolCall, ToolCallRecord, refused
from stepfleet.orchestrator.records.conversation.messages import Message
from stepfleet.orchestrator.records.conversation.tool_text import result_text
from stepfleet.orchestrator.records.errors import ErrorInfo


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
