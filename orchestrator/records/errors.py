"""The six error types, a failure as a value, and the root of the exceptions.

Inside a run failures travel as `ErrorInfo`; exceptions cross the edges. Their tree is in
`stepfleet.orchestrator.errors`.
"""

import hashlib
import operator
from enum import StrEnum
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, computed_field

from stepfleet.orchestrator.records.base import Record, well_formed
from stepfleet.orchestrator.records.text.redaction import redact_error
from stepfleet.orchestrator.records.text.tracebacks import traceback_of
from stepfleet.orchestrator.records.text.validation import common_form


class ErrorType(StrEnum):
    """The kind of a failure; the key of every error policy."""

    TOOL = "tool"
    MODEL = "model"
    VALIDATION = "validation"
    RATE_LIMIT = "rate_limit"
    TIMEOUT = "timeout"
    UNKNOWN = "unknown"


class ModelErrorCode(StrEnum):
    """Why a model call failed: the `code` of its error.

    A custom model gives one to its `ModelError(code=...)`; without one it is `MODEL_ERROR`.
    """

    INVALID_API_KEY = "INVALID_API_KEY"
    """The service does not know the key, or got none."""
    PERMISSION_DENIED = "PERMISSION_DENIED"
    """The key may not do this."""
    MODEL_NOT_FOUND = "MODEL_NOT_FOUND"
    """There is no such model at that address, or nothing at all."""
    CONTEXT_OVERFLOW = "CONTEXT_OVERFLOW"
    """The conversation is longer than the model's context window."""
    CONTENT_FILTER = "CONTENT_FILTER"
    """The service refuses the content."""
    QUOTA_EXHAUSTED = "QUOTA_EXHAUSTED"
    """Money or quota is used up: waiting alone does not help."""
    INVALID_REQUEST = "INVALID_REQUEST"
    """The service cannot fulfil the request."""
    RATE_LIMIT = "RATE_LIMIT_ERROR"
    """Refused for now."""
    TIMEOUT = "TIMEOUT_ERROR"
    """No answer in time."""
    SERVER_ERROR = "SERVER_ERROR"
    """The service is in trouble."""
    CONNECTION_ERROR = "CONNECTION_ERROR"
    """The service cannot be reached, or the connection broke."""
    CIRCUIT_OPEN = "CIRCUIT_OPEN"
    """The service is out for the whole fleet: no call was made."""
    MALFORMED_ANSWER = "MALFORMED_ANSWER"
    """The service answered, and the answer cannot be read."""
    EMPTY_ANSWER = "EMPTY_ANSWER"
    """The service answered without text and without a call."""
    SETUP = "CONFIG_ERROR"
    """The agent or the worker is not set up for the call."""
    OTHER = "MODEL_ERROR"
    """Anything else."""


PERMANENT = frozenset(
    {
        ModelErrorCode.INVALID_API_KEY,
        ModelErrorCode.PERMISSION_DENIED,
        ModelErrorCode.MODEL_NOT_FOUND,
        ModelErrorCode.CONTEXT_OVERFLOW,
        ModelErrorCode.CONTENT_FILTER,
        ModelErrorCode.QUOTA_EXHAUSTED,
        ModelErrorCode.INVALID_REQUEST,
        ModelErrorCode.SETUP,
    }
)
"""Codes of model errors that a repeated call would meet again."""


def is_permanent(error_type: "ErrorType", code: str | None) -> bool:
    """Return whether the same model call would fail in the same way: no policy repeats it."""
    return error_type is ErrorType.MODEL and code in PERMANENT


class ErrorInfo(Record):
    """One failure. `code` is one of the codes in `stepfleet.orchestrator.errors`."""

    type: ErrorType
    code: str
    message: Annotated[str, AfterValidator(redact_error)]
    """Without secrets of the environment: all errors become records here."""
    retryable: bool = False
    tool_name: str | None = None
    call_id: str | None = None
    traceback: str | None = Field(default=None, exclude_if=operator.not_)
    """Where the user's code raised it: for people; no model reads it."""

    def without_traceback(self) -> "ErrorInfo":
        """Return the failure as it stands next to a record that has the traceback."""
        return self.model_copy(update={"traceback": None}) if self.traceback else self

    @property
    def permanent(self) -> bool:
        """Whether repeating the model call cannot help, under any policy."""
        return is_permanent(self.type, self.code)


ANSWER_REFUSED = "ANSWER_REFUSED"
"""The code of an answer that its contract does not take. The run goes on: its step did not fail."""
_LONGEST = 1_000


def refused_answer(why: str) -> str:
    """Return the text of an answer that was refused because of `why`."""
    return f"answer refused: {well_formed(why)}"[:_LONGEST]


def answer_refusal(text: str) -> ErrorInfo:
    """Return a refused answer as an error, as it explains the end of its run."""
    return ErrorInfo(type=ErrorType.VALIDATION, code=ANSWER_REFUSED, message=text, retryable=True)


class Cause(Record):
    """The common cause of equal errors, or of runs that ended in the same way.

    `kind` is the type of an error (`ErrorType`) or a stop reason; `tool` or `model` is where it
    happened. `text` is the message without numbers, ids and quoted values, so that "gadget 17
    missing" and "gadget 18 missing" have one cause; it has at most 300 characters.
    """

    # The computed field of `to_dict` is accepted again.
    model_config = ConfigDict(extra="ignore")

    kind: str
    code: str | None = None
    tool: str | None = None
    model: str | None = None
    text: str = ""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def key(self) -> str:
        """Ten hexadecimal digits: the same for the same cause, in every process and release."""
        parts = (self.kind, self.code, self.tool, self.model, self.text)
        named = "\0".join(part or "" for part in parts)
        return hashlib.sha256(named.encode(errors="replace")).hexdigest()[:10]

    def __str__(self) -> str:
        """Return the place and the text on one line."""
        if not (self.code or self.text):
            return f"{self.kind}, without an error"
        code = f" error ({self.code})" if self.code else ""
        place = f"tool {self.tool!r}" if self.tool else f"{self.kind}{code}"
        return f"{place}: {self.text}" if self.text else place


def cause_of(error: ErrorInfo, model: str | None = None) -> Cause:
    """Return the cause of a failure; `model` is the run's, and left out where a tool failed."""
    return Cause(
        kind=error.type.value,
        code=error.code,
        tool=error.tool_name,
        model=None if error.tool_name else model,
        text=common_form(error.message),
    )


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
        return cls.model_construct()

    @property
    def code(self) -> str | None:
        """The code of the newest failure, as far as it is known."""
        code = self.metadata.get("code")
        return code if isinstance(code, str) else None

    @property
    def permanent(self) -> bool:
        """Whether the newest failure is of a model call that would fail in the same way."""
        return is_permanent(self.type, self.code)


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
        known = {"traceback": traceback_of(self), **fields}
        return ErrorInfo(
            type=self.type,
            code=self.code,
            message=well_formed(self.message),
            retryable=self.retryable,
            **known,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Rebuild from the message and the instance's fields, across processes."""
        return (_rebuild, (self.__class__, self.message, self.__dict__))


def _rebuild(cls: type[AgentException], message: str, fields: dict[str, Any]) -> AgentException:
    error = cls.__new__(cls)
    Exception.__init__(error, message)
    error.__dict__.update(fields)
    return error
