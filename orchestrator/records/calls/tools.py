"""Tool calls as the model made them, their records, and their entries in the log. Pure values."""

import operator
from collections.abc import Sequence
from datetime import datetime
from typing import Any, overload

from pydantic import ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from stepfleet.orchestrator.records.base import Record
from stepfleet.orchestrator.records.calls.answers import Decision, RunEnd
from stepfleet.orchestrator.records.errors import ErrorInfo, ErrorType

NOT_EXECUTED = "NOT_EXECUTED"
"""Code of calls that an interruption kept from running: answered, but no failure of the step."""
DENIED = "DENIED"
"""Code of calls that a person did not approve: no failure of the step either."""


class ToolCall(Record):
    """One call of the model.

    `error` is the reason why the call cannot be executed (no name, arguments that are not a JSON
    object, ...); such a call is answered with that error and never run.
    """

    id: str
    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)
    error: str | None = None


class ToolSpec(Record):
    """The description of a tool for the model; `parameters` is a JSON Schema of an object.

    `strict` asks for the provider's strict mode, or switches it off; None leaves it to the
    provider's module.
    """

    name: str
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=dict)
    strict: bool | None = Field(default=None, exclude_if=lambda value: value is None)


class ToolCallRecord(Record):
    """One executed (or refused) tool call: the stored form.

    `result` is the tool's value as JSON data; the text that the model reads is the tool
    message with the same call id. `error` is set exactly when `is_error` is true.
    `duration_ms` is monotonic time in milliseconds; `timestamp` the UTC start.
    """

    tool_name: str
    call_id: str
    arguments: dict[str, Any] = Field(default_factory=dict)
    result: Any = None
    is_error: bool = False
    duration_ms: float | None = None
    timestamp: datetime
    error: ErrorInfo | None = None
    repeated: bool = False
    """True when an earlier attempt had started this call and its outcome stayed unknown."""
    custom_state: dict[str, Any] = Field(default_factory=dict)
    """Entries of the run's custom state that the call set (`tools.StateUpdate`)."""
    media: tuple[dict[str, Any], ...] = ()
    """Content blocks that the model sees after the step's results (`tools.WithMedia`)."""
    version: str | None = None
    """The digest of a server's tool; the versions of other tools stand in the configuration."""
    run: RunEnd | None = Field(default=None, exclude_if=operator.not_)
    """The run that the call has started, without its output."""
    decision: Decision | None = Field(default=None, exclude_if=operator.not_)
    """Who approved the call, or answered it, and when."""


def refused(
    call: ToolCall,
    at: datetime,
    *,
    code: str,
    message: str,
    error_type: ErrorType = ErrorType.TOOL,
) -> ToolCallRecord:
    """Return an error record of a call that was not executed."""
    return ToolCallRecord(
        tool_name=call.name,
        call_id=call.id,
        arguments=call.arguments,
        is_error=True,
        duration_ms=0.0,
        timestamp=at,
        error=ErrorInfo(
            type=error_type, code=code, message=message, tool_name=call.name, call_id=call.id
        ),
    )


MOST_OF_TRACEBACKS = 16_000


def with_few_tracebacks(records: tuple[ToolCallRecord, ...]) -> tuple[ToolCallRecord, ...]:
    """Return a step's records with short tracebacks: every claim reads them."""
    left, kept = MOST_OF_TRACEBACKS, []
    for record in records:
        error = record.error
        size = len(error.traceback or "") if error else 0
        left -= size
        if error and size and left < 0:
            record = record.model_copy(update={"error": error.without_traceback()})  # noqa: PLW2901
        kept.append(record)
    return tuple(kept) if left < 0 else records


class _Result(Record):
    model_config = ConfigDict(extra="ignore")

    tool_calls: tuple[ToolCallRecord, ...] = ()


class _Step(Record):
    model_config = ConfigDict(extra="ignore")

    result: _Result


class LoggedCalls(Sequence[ToolCallRecord]):
    """The calls of stored steps (`LoggedStep` as JSON), and of later steps.

    Every claim holds the whole log, and hardly any criterion reads earlier calls: building the
    records at each step would cost more than all its decisions. The first access raises
    `pydantic.ValidationError` where a stored step cannot be read.
    """

    __slots__ = ("_later", "_read", "_stored")

    def __init__(
        self, stored: Sequence[str | bytes] = (), later: tuple[ToolCallRecord, ...] = ()
    ) -> None:
        self._stored = stored
        self._later = later
        self._read: tuple[ToolCallRecord, ...] | None = None

    def __add__(self, calls: tuple[ToolCallRecord, ...]) -> "LoggedCalls":
        """Return these calls followed by others, unread as long as these are."""
        longer = LoggedCalls(self._stored, self._later + calls)
        if self._read is not None:
            longer._read = self._read + calls
        return longer

    def __radd__(self, calls: tuple[ToolCallRecord, ...]) -> tuple[ToolCallRecord, ...]:
        """Return others followed by these calls."""
        return calls + self._calls

    @overload
    def __getitem__(self, place: int) -> ToolCallRecord: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[ToolCallRecord, ...]: ...
    def __getitem__(self, place: int | slice) -> ToolCallRecord | tuple[ToolCallRecord, ...]:
        """Return a call, or several."""
        return self._calls[place]

    def __len__(self) -> int:
        """Return how many calls there are."""
        return len(self._calls)

    def __eq__(self, other: object) -> bool:
        """Return whether `other` has equal calls in the same order."""
        return isinstance(other, tuple | LoggedCalls) and self._calls == tuple(other)

    def __hash__(self) -> int:
        """Return the hash of the calls."""
        return hash(self._calls)

    def __repr__(self) -> str:
        """Return the calls as a tuple shows them."""
        return repr(self._calls)

    @property
    def _calls(self) -> tuple[ToolCallRecord, ...]:
        if self._read is None:
            steps = map(_Step.from_json, self._stored)
            logged = tuple(call for step in steps for call in step.result.tool_calls)
            self._read = logged + self._later
        return self._read

    @classmethod
    def __get_pydantic_core_schema__(
        cls, _source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Serialize as the tuple of the calls; only our own store makes unread ones."""
        return core_schema.is_instance_schema(
            cls,
            serialization=core_schema.plain_serializer_function_ser_schema(
                tuple, return_schema=handler(tuple[ToolCallRecord, ...])
            ),
        )
