"""The cause of a run's end: the last error of its steps, where it explains the end. Pure."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from pydantic import Field

from stepfleet.orchestrator.records.base import Record
from stepfleet.orchestrator.records.errors import (
    Cause,
    ErrorInfo,
    ErrorType,
    ModelErrorCode,
    cause_of,
)
from stepfleet.orchestrator.records.outcome import StopReason
from stepfleet.orchestrator.records.text.common_form import common_form


class LastError(ErrorInfo):
    """The newest error of an execution: that of its step `step`.

    Errors of the same cause occurred in `failed_steps` of the execution's `steps`, and
    `good_steps` have followed without an error.
    """

    step: int
    failed_steps: int = 1
    steps: int = 1
    good_steps: int = 0

    def __str__(self) -> str:
        """Return the place, how often it occurred, and the message."""
        often = f"{self.failed_steps} of {self.steps} steps"
        where = often if self.failed_steps > 1 else f"step {self.step}"
        if self.tool_name:
            return f"tool {self.tool_name!r} failed in {where}: {self.message}"
        return f"{self.type.value} error ({self.code}) in {where}: {self.message}"


class Erring(Protocol):
    """A step with its errors."""

    @property
    def step(self) -> int:
        """Its number, from 1."""

    @property
    def problems(self) -> tuple[ErrorInfo, ...]:
        """What went wrong, and why its answer was refused."""


class Refused(Protocol):
    """An attempt at a step that was not committed."""

    @property
    def step(self) -> int:
        """The number of its step, from 1."""

    @property
    def reason(self) -> str | None:
        """Why its model call failed, where it did."""

    @property
    def error_type(self) -> ErrorType | None:
        """The type of that failure, where it is known."""

    @property
    def code(self) -> str | None:
        """The code of that failure, where it is known."""


def last_error(steps: Sequence[Erring], lost: Iterable[Refused] = ()) -> LastError | None:
    """Return the last error of an execution with these steps; None where there is none.

    Of several errors in a step it is the one that occurred in most steps. A refused answer counts
    as an error. `lost` are the attempts
    at a further step, which was never committed: the model was out of reach until the end.
    """
    refusals = [one for one in lost if one.reason]
    if refusals:
        newest_refusal = refusals[-1]
        return LastError(
            type=newest_refusal.error_type or ErrorType.MODEL,
            code=newest_refusal.code or ModelErrorCode.OTHER,
            message=newest_refusal.reason or "",
            retryable=True,
            step=newest_refusal.step,
            steps=len(steps) + 1,
        )
    failed = [step for step in steps if step.problems]
    if not failed:
        return None
    keys = [{cause_of(error).key for error in step.problems} for step in failed]
    newest = failed[-1]
    counted = [sum(cause_of(one).key in step for step in keys) for one in newest.problems]
    most = max(counted)
    error = newest.problems[counted.index(most)]
    return LastError.model_construct(
        **dict(error.without_traceback()),
        step=newest.step,
        failed_steps=most,
        steps=len(steps),
        good_steps=len(steps) - 1 - steps.index(newest),
    )


def explains(reason: StopReason, last: LastError | None) -> LastError | None:
    """Return the last error where it explains the end: it is of the last step, or of half of them.

    A cancel is never explained by an error.
    """
    if last is None or reason is StopReason.USER_REQUESTED:
        return None
    return None if last.good_steps and last.failed_steps * 2 < last.steps else last


def cause_of_end(
    reason: StopReason, error: str | None, last: LastError | None, model: str | None
) -> Cause:
    """Return why a run ended that did not complete.

    That is its last error where it explains the end, else the stop reason, with the text of
    `error` where the run has one.
    """
    if (explaining := explains(reason, last)) is not None:
        return cause_of(explaining, model)
    return Cause(kind=reason.value, text=common_form(error or ""))


class FailedRun(Record):
    """A run that ended without completing, as failures are counted and selected.

    `text` is the error that explains its end, else the text of the end itself. `step` is that of
    the error, or the last one. `limits` are the limits that stopped it, with twice their values, or
    twice what was used: a retry has to raise them.
    """

    run_id: str
    line_id: str | None = None
    tenant: str | None = None
    agent: str
    model: str
    stop_reason: StopReason
    step: int
    text: str
    cause: Cause
    limits: dict[str, int | float] = Field(default_factory=dict)
