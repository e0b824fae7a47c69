"""What went wrong: the six error types, a failure as a value, and the root of the exceptions.

Inside a run failures travel as `ErrorInfo`; exceptions cross the edges. Their tree is in
`stepfleet.orchestrator.errors`.
"""

from enum import StrEnum
from typing import Any

from pydantic import Field

from stepfleet.orchestrator.records.base import Record
from stepfleet.orchestrator.records.foreign_text import well_formed


class ErrorType(StrEnum):
    """What kind of thing failed; the key of every error policy."""

    TOOL = "tool"
    MODEL = "model"
    VALIDATION = "validation"
    RATE_LIMIT = "rate_limit"
    TIMEOUT = "timeout"
    UNKNOWN = "unknown"


class ErrorInfo(Record):
    """One failure. `code` is one of the codes in `stepfleet.orchestrator.errors`."""

    type: ErrorType
    code: str
    message: str
    retryable: bool = False
    tool_name: str | None = None
    call_id: str | None = None


class ErrorContext(Record):
    """The failures of an execution as an error policy sees them (see `error_policy`)."""

    type: ErrorType = ErrorType.UNKNOWN
    consecutive_failures: int = 0
    total_failures: int = 0
    message: str | None = None
    tool_name: str | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)

    @classmethod
    def none(cls) -> "ErrorContext":
        """Return the context of an execution without failures."""
        return cls()


class AgentException(Exception):  # noqa: N818 - the name is the public contract
    """Root of everything that Stepfleet raises."""

    code = "UNKNOWN_ERROR"
    type = ErrorType.UNKNOWN
    retryable = False

    def __init__(self, message: str = "", *, retryable: bool | None = None) -> None:
        super().__init__(message)
        self.message = message
        if retryable is not None:
            self.retryable = retryable

    def to_info(self, **fields: Any) -> ErrorInfo:
        """Return the failure as a value; `fields` add the tool's name and call id."""
        return ErrorInfo(
            type=self.type,
            code=self.code,
            message=well_formed(self.message),
            retryable=self.retryable,
            **fields,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Rebuild from the message and the instance's fields, across processes."""
        return (_rebuild, (self.__class__, self.message, self.__dict__))


def _rebuild(cls: type[AgentException], message: str, fields: dict[str, Any]) -> AgentException:
    error = cls.__new__(cls)
    Exception.__init__(error, message)
    error.__dict__.update(fields)
    return error
