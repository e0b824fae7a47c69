"""The exception tree: one root, a code and a retryable flag on each, messages with the fix.

Inside a run failures travel as `ErrorInfo` values; these exceptions cross the edges. `code` is
one of the eleven codes that models see, or one that no model ever sees: `STORE_ERROR`,
`ARCHIVE_ERROR`, `NOT_FOUND`, `CONFLICT`, `ANSWER_REFUSED`, and those of `ModelErrorCode`, which
distinguish failures of model calls.
`MemoryError` is importable by its name and left out of `import *`, so that Python's own is never
shadowed unasked.
"""

from stepfleet.orchestrator.records.errors import AgentException, ErrorType, ModelErrorCode
from stepfleet.orchestrator.records.run.results import (
    MaxStepsExceeded,
    RunActive,
    RunFailed,
    StructuredDataError,
)
from stepfleet.orchestrator.records.steps import FinishReason
from stepfleet.orchestrator.records.usage import Spent, UsageStats

__all__ = [
    "AgentException",
    "AgentMemoryError",
    "ArchiveError",
    "ConfigurationError",
    "ConflictError",
    "ContextWindowError",
    "InvalidToolCallError",
    "MaxStepsExceeded",
    "ModelError",
    "ModelTimeoutError",
    "NotFoundError",
    "RateLimitError",
    "RunActive",
    "RunFailed",
    "SerializationError",
    "StoreError",
    "StrategyError",
    "StructuredDataError",
    "ToolArgumentsError",
    "ToolExecutionError",
    "ToolNotFoundError",
    "ToolTimeoutError",
]


class ConfigurationError(AgentException):
    """A setting, an agent definition or a batch line is wrong; the message names field and fix."""

    code = "CONFIG_ERROR"


class NotFoundError(ConfigurationError):
    """No run, batch or schedule has that id or name, or none has it any more."""

    code = "NOT_FOUND"


class ConflictError(ConfigurationError):
    """A request contradicts the stored state.

    A run has not ended, or an id or idempotency key belongs to another input.
    """

    code = "CONFLICT"


class SerializationError(AgentException):
    """A stored record or a message cannot be read or written."""

    code = "SERIALIZATION_ERROR"


class StoreError(AgentException):
    """Redis cannot be reached, refuses, or holds unexpected data."""

    code = "STORE_ERROR"
    retryable = True


class ArchiveError(AgentException):
    """The archive cannot be reached, refuses, or lacks what was written (`is_missing`)."""

    code = "ARCHIVE_ERROR"
    retryable = True

    def __init__(self, message: str = "", *, is_missing: bool = False) -> None:
        super().__init__(message, retryable=not is_missing)
        self.is_missing = is_missing


class ToolExecutionError(AgentException):
    """A tool failed."""

    code = "TOOL_EXECUTION_ERROR"
    type = ErrorType.TOOL


class ToolNotFoundError(ToolExecutionError):
    """No tool of that name is on offer."""

    code = "TOOL_NOT_FOUND"


class ToolTimeoutError(ToolExecutionError):
    """A tool took longer than its timeout."""

    code = "TIMEOUT_ERROR"
    type = ErrorType.TIMEOUT
    retryable = True


class ToolArgumentsError(ToolExecutionError):
    """The arguments of a call do not fit the tool's schema; the tool was not run."""

    code = "VALIDATION_ERROR"
    type = ErrorType.VALIDATION
    retryable = True


class InvalidToolCallError(ToolExecutionError):
    """The model's call itself is malformed: no name, or arguments that are not a JSON object."""

    code = "INVALID_FUNCTION_CALL"
    type = ErrorType.VALIDATION


LONGEST_WISH = 3600.0
"""Seconds; no wish of a provider is longer."""


def bounded_wish(seconds: float | None) -> float | None:
    """Return a wish to wait in seconds, from 0 to an hour; None if it is not a number."""
    if not isinstance(seconds, int | float) or seconds != seconds:  # noqa: PLR0124 - nan
        return None
    return float(min(max(seconds, 0), LONGEST_WISH))


class ModelError(AgentException):
    """A model call failed.

    `retryable` marks a transient failure, which is tried again as the same step;
    `retry_after` is the provider's wish in seconds (an hour at most), if it sent one. `code` is the
    cause; those of `PERMANENT` are never retried. `received` is set where the provider was at work
    when the call failed, so that it may charge for it: the approximate number of tokens that had
    arrived; `usage` is the usage that it reported, if any. The worker adds `model`, the full name
    of the one that was called, `spent`, `outage`: the circuits that are open, and `finish_reason`
    where the model had ended an answer that is none. `unsent` is set where it did not make the
    call, `entered` where the ledger has what it may have cost.
    """

    code = ModelErrorCode.OTHER.value
    type = ErrorType.MODEL

    def __init__(
        self,
        message: str = "",
        *,
        retryable: bool = False,
        retry_after: float | None = None,
        code: ModelErrorCode | None = None,
        received: int | None = None,
    ) -> None:
        super().__init__(message, retryable=retryable)
        self.retry_after = bounded_wish(retry_after)
        self.received = received
        self.model = ""
        self.usage: UsageStats | None = None
        self.spent: Spent | None = None
        self.outage: tuple[str, ...] = ()
        self.finish_reason: FinishReason | None = None
        self.unsent = False
        self.entered = False
        if code is not None:
            self.code = code.value

    def name_request(self, request_id: str) -> None:
        """Add the provider's name of the request, which its support asks for."""
        self.message = f"{self.message} (request {request_id})"
        self.args = (self.message,)


class RateLimitError(ModelError):
    """The provider refuses for now (429).

    `unsent` is set where the worker did not make the call: others had just been refused, or the
    model's limits have no room. `sheds` is set where the provider lacks capacity for the tier of
    the call (flex); the account's limits are not reached. `stated` has the limits per minute that
    the refusal names, by kind (`r`equests, `t`okens, `i`nput, `o`utput). The worker adds `limit`,
    the name of the limits that it was made under.
    """

    code = ModelErrorCode.RATE_LIMIT.value
    type = ErrorType.RATE_LIMIT

    def __init__(self, message: str = "", *, retry_after: float | None = None) -> None:
        super().__init__(message, retryable=True, retry_after=retry_after)
        self.sheds = False
        self.stated: dict[str, float] = {}
        self.limit = ""


class ContextWindowError(ModelError):
    """The conversation is longer than the model's context window.

    `limit` is the window in tokens when the provider named it.
    """

    code = ModelErrorCode.CONTEXT_OVERFLOW.value

    def __init__(self, message: str = "", *, limit: int | None = None) -> None:
        super().__init__(message)
        self.limit = limit


class ModelTimeoutError(ModelError):
    """A model call took longer than its timeout."""

    code = "TIMEOUT_ERROR"
    type = ErrorType.TIMEOUT

    def __init__(self, message: str = "", *, received: int | None = None) -> None:
        super().__init__(message, retryable=True, received=received)


class StrategyError(AgentException):
    """A reasoning strategy failed."""

    code = "UNKNOWN_ERROR"


class AgentMemoryError(AgentException):
    """A memory policy or store failed (`MemoryError` in the exception tree of the sources)."""

    code = "UNKNOWN_ERROR"


MemoryError = AgentMemoryError  # noqa: A001 - the name in the sources' exception tree
