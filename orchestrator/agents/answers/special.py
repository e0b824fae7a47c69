"""Calls that the framework answers itself, such as `final_answer`; agents can add their own.

A special tool is never run like a tool: its handler decides the outcome of the call for the run.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from stepfleet.orchestrator.agents.answers.sinks import ErrorSink
from stepfleet.orchestrator.errors import (
    AgentException,
    ConfigurationError,
    InvalidToolCallError,
    ToolArgumentsError,
    ToolExecutionError,
)
from stepfleet.orchestrator.records.calls.tools import ToolCall, ToolSpec
from stepfleet.orchestrator.records.errors import ErrorInfo
from stepfleet.orchestrator.records.state import AgentState
from stepfleet.orchestrator.records.text.redaction import redact
from stepfleet.orchestrator.records.text.tracebacks import traceback_of
from stepfleet.orchestrator.tools.schemas.handles import SchemaHandle, handle_of

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
