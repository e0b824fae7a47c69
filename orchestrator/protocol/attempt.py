"""The result of an attempt at a step: five kinds of value."""

from datetime import datetime
from enum import StrEnum

from stepfleet.orchestrator.records.calls.answers import Awaited, awaited_by
from stepfleet.orchestrator.records.calls.tools import (
    NOT_EXECUTED,
    ToolCall,
    ToolCallRecord,
    refused,
)
from stepfleet.orchestrator.records.errors import ErrorInfo, ErrorType
from stepfleet.orchestrator.records.memory_window import Remembered
from stepfleet.orchestrator.records.outcome import ContinuationOutcome
from stepfleet.orchestrator.records.responses import LLMResponse
from stepfleet.orchestrator.records.steps import FinishReason, HandedOver, Progress
from stepfleet.orchestrator.records.usage import Spent
from stepfleet.orchestrator.records.values import value_class


@value_class(frozen=True, slots=True)
class Span:
    """When an attempt started (UTC, by Redis's clock) and how long it took (monotonic seconds)."""

    started_at: datetime
    seconds: float


@value_class(frozen=True, slots=True)
class Answered:
    """The result of a turn: the model answered and all its tool calls have a record, in call order.

    `handled` are the indexes of calls that the agent's reasoner answered; `progress` is its
    reading of the response. `noted` is set where this attempt has journaled the response: then no
    other one pays for it again. `handoff` is set where another agent goes on with the run.
    """

    span: Span
    response: LLMResponse
    records: tuple[ToolCallRecord, ...] = ()
    texts: tuple[str, ...] = ()
    cost_usd: float = 0.0
    progress: Progress | None = None
    handled: frozenset[int] = frozenset()
    noted: bool = False
    handoff: HandedOver | None = None


@value_class(frozen=True, slots=True)
class Failed:
    """The attempt failed before all tools had run.

    `transient` failures are tried again as the same step; `limited` marks a refusal for now
    (429), which costs time but no attempt; `retry_after` is the provider's wish in seconds and
    `refused` the model. `remembered` is memory work that was paid for before it failed. `spent` is
    set where the provider may charge for the call itself. `outage` names the circuits of services
    that are out, where no other model could answer. With `unsent` the call was not made. `entered`
    is set where no call is open: the ledger has what it may have cost, or none was made.
    `finish_reason` is set where the model had ended an answer that is none.
    """

    span: Span
    error: ErrorInfo
    transient: bool = False
    limited: bool = False
    retry_after: float | None = None
    remembered: Remembered | None = None
    spent: Spent | None = None
    outage: tuple[str, ...] = ()
    refused: str = ""
    unsent: bool = False
    finish_reason: FinishReason | None = None
    entered: bool = False


@value_class(frozen=True, slots=True)
class Prevented:
    """A criterion forbade the call before it was made."""

    span: Span
    outcome: ContinuationOutcome


class Interruption(StrEnum):
    """Why an attempt was interrupted."""

    CANCELLED = "cancelled"
    HANDED_BACK = "handed_back"
    LEASE_LOST = "lease_lost"
    TIMED_OUT = "timed_out"
    TERMINATED = "terminated"

    @property
    def from_outside(self) -> bool:
        """Whether an operator's limit or request ended the attempt: it counts as a timeout."""
        return self in (Interruption.TIMED_OUT, Interruption.TERMINATED)


@value_class(frozen=True, slots=True)
class Interrupted:
    """The attempt was interrupted.

    `answer` is set when the model had answered; the record of a call that had no result says that
    it was not run. `unsent` is set where no model was called, `spent` where one was: what that may
    have cost, or its model alone.
    """

    span: Span
    by: Interruption
    answer: Answered | None = None
    unsent: bool = False
    spent: Spent | None = None

    @property
    def response(self) -> LLMResponse | None:
        """What the model had answered, if it had."""
        return self.answer.response if self.answer else None


@value_class(frozen=True, slots=True)
class Wait:
    """One call that a step waits for: its index in the response, its tool's queue, its tool.

    A queue that begins with @ is none (see `Awaited` of `records.calls.answers`): `key` then names
    what the call waits for, and `within` is that wait's time limit in seconds (None: the run's
    patience).
    """

    index: int
    queue: str
    tool: str
    key: str = ""
    within: float | None = None


@value_class(frozen=True, slots=True)
class Parked:
    """The model answered, and the step waits for tool calls that are tasks of their own.

    `answer` is committed if a cancel arrives before it waits: the calls were not run.
    """

    span: Span
    waits: tuple[Wait, ...]
    answer: Answered


Attempt = Answered | Failed | Prevented | Interrupted | Parked


_WHY = {
    Interruption.CANCELLED: "the run was cancelled before this call was finished",
    Interruption.TIMED_OUT: "the step's time limit ended this call",
    Interruption.TERMINATED: "this call's task was revoked and terminated",
    Interruption.HANDED_BACK: "the worker stopped before this call was finished",
    Interruption.LEASE_LOST: "another worker took this step over",
}


_ANSWERS = {
    Awaited.RUN: "the run that it had started was cancelled; give that one a shorter time_limit",
    Awaited.APPROVAL: "nobody had approved or denied it; decide sooner",
    Awaited.PERSON: "nobody had answered; answer sooner",
}


def not_run(call: ToolCall, by: Interruption, at: datetime) -> ToolCallRecord:
    """Return the record of a call that an interruption kept from finishing."""
    return refused(
        call,
        at,
        error_type=ErrorType.TIMEOUT if by.from_outside else ErrorType.TOOL,
        code="TIMEOUT_ERROR" if by.from_outside else NOT_EXECUTED,
        message=_WHY[by],
    )


def unknown_outcome(call: ToolCall, at: datetime) -> ToolCallRecord:
    """Return the record of a call that a lost worker had started and that must not run twice."""
    record = refused(
        call,
        at,
        code="OUTCOME_UNKNOWN",
        message=(
            "a worker was lost while this tool ran; whether it took effect is unknown, "
            "and it was not run again"
        ),
    )
    return record.model_copy(update={"repeated": True})


def waited_in_vain(call: ToolCall, at: datetime, place: str = "") -> ToolCallRecord:
    """Return the record of a call that had no result when the run's patience ended.

    `place` is its queue, or what it waited for.
    """
    awaited = awaited_by(place)
    fix = _ANSWERS[awaited] if awaited else "start more workers for its queue"
    return refused(
        call,
        at,
        error_type=ErrorType.TIMEOUT,
        code="TIMEOUT_ERROR",
        message=(
            f"tool {call.name!r} had no result when the run's time limit had passed; {fix}, or "
            "raise time_limit"
        ),
    )


def gave_up(call: ToolCall, at: datetime, crashes: int) -> ToolCallRecord:
    """Return the record of a call that repeatedly ended its worker."""
    return refused(
        call,
        at,
        code="WORKER_LOST",
        message=f"tool {call.name!r} ended its worker {crashes} times; it is not tried again",
    )
