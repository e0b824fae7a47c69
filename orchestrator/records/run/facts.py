"""A run's facts: the fields of a result, why it ended, and the figures derived from them."""

import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Any, Protocol

from pydantic import ConfigDict, Field, computed_field

from stepfleet.orchestrator.records.base import Record
from stepfleet.orchestrator.records.errors import (
    Cause,
    ErrorInfo,
    ErrorType,
    ModelErrorCode,
    cause_of,
)
from stepfleet.orchestrator.records.outcome import ContinuationOutcome, StopReason
from stepfleet.orchestrator.records.state import Lifecycle
from stepfleet.orchestrator.records.steps import SHORTENED, FinishReason, Handoff, StepResult
from stepfleet.orchestrator.records.text.validation import common_form
from stepfleet.orchestrator.records.usage import UsageStats, sum_usd


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


class Discarded(Protocol):
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


def last_error(steps: Sequence[Erring], lost: Iterable[Discarded] = ()) -> LastError | None:
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


class OriginKind(StrEnum):
    """How a run began from another one."""

    FORK = "fork"
    CHECKPOINT = "checkpoint"
    RESULT = "result"


class RunOrigin(Record):
    """The run from which this one began, and the part taken over.

    `at` is the number of its steps that this run's log begins with; `tokens` and `cost_usd` are
    what those steps had used: they are part of this run's totals and were paid for there.
    """

    kind: OriginKind
    run_id: str
    at: int = 0
    tokens: int = 0
    cost_usd: float = 0.0


class RunStatus(StrEnum):
    """The four ways in which a run ends, derived from its stop reason."""

    COMPLETED = "completed"
    MAX_ITERATIONS_REACHED = "max_iterations_reached"
    ERROR = "error"
    CANCELLED = "cancelled"


_ENDINGS = {
    StopReason.COMPLETED: (RunStatus.COMPLETED, Lifecycle.COMPLETED),
    StopReason.FINISH_REASON: (RunStatus.COMPLETED, Lifecycle.COMPLETED),
    StopReason.STEPS_LIMIT: (RunStatus.MAX_ITERATIONS_REACHED, Lifecycle.STOPPED),
    StopReason.TOKEN_LIMIT: (RunStatus.MAX_ITERATIONS_REACHED, Lifecycle.STOPPED),
    StopReason.TIME_LIMIT: (RunStatus.MAX_ITERATIONS_REACHED, Lifecycle.STOPPED),
    StopReason.GUARD: (RunStatus.ERROR, Lifecycle.STOPPED),
    StopReason.ERROR: (RunStatus.ERROR, Lifecycle.FAILED),
    StopReason.RETRY_LIMIT: (RunStatus.ERROR, Lifecycle.FAILED),
    StopReason.USER_REQUESTED: (RunStatus.CANCELLED, Lifecycle.CANCELLED),
}


def run_status(reason: StopReason) -> RunStatus:
    """Return the status of a run with that stop reason."""
    return _ENDINGS[reason][0]


def end_state(reason: StopReason) -> Lifecycle:
    """Return the end state of a run with that stop reason."""
    return _ENDINGS[reason][1]


class LostKind(StrEnum):
    """Why an attempt at a step was not committed."""

    CRASH = "crash"
    """Its worker vanished."""
    LATE = "late"
    """Another worker had taken over."""
    DEFERRED = "deferred"
    """A transient failure of the model; the step was tried again."""
    FAILED = "failed"
    """A transient failure of the model that became a failed step."""
    INTERRUPTED = "interrupted"
    """Cancelled or handed back."""
    RETRIED = "retried"
    """A failed step that was taken back."""


class LostAttempt(Record):
    """An attempt at a step that was not committed: what it took, and whether a call repeats.

    `kind` is one of `LostKind`; another release may know more of them. `ambiguous` is true when a
    model call may have been paid for without a result; `cost_usd` is its cost, or None when its
    usage never became known. Where `estimated` is true, tokens and cost are counted from the texts
    that were sent and received, or else follow those of the call that was made in its place.
    `model` and `usage` are the call's, where they are known, and `service_tier` is the provider's
    tier; `default_priced` is true where no table has that model. `at_ms` is when it was noted, in
    milliseconds since 1970. `reason`, `error_type` and `code` are those of an error; entries of
    earlier releases have the reason alone.
    """

    # Records of later versions are read too.
    model_config = ConfigDict(extra="ignore")

    kind: str
    step: int
    seconds: float = 0.0
    ambiguous: bool = False
    tokens: int = 0
    cost_usd: float | None = None
    reason: str | None = None
    error_type: ErrorType | None = Field(default=None, exclude_if=operator.not_)
    code: str | None = Field(default=None, exclude_if=operator.not_)
    estimated: bool = False
    model: str | None = Field(default=None, exclude_if=operator.not_)
    usage: UsageStats | None = Field(default=None, exclude_if=operator.not_)
    default_priced: bool = Field(default=False, exclude_if=operator.not_)
    service_tier: str = Field(default="", exclude_if=operator.not_)
    at_ms: int = Field(default=0, exclude_if=operator.not_)

    @property
    def may_be_paid(self) -> bool:
        """Whether a call of it was or may have been paid for that no committed step has."""
        return self.ambiguous or (self.tokens > 0 and self.kind != LostKind.LATE)


class RunFacts(Record):
    """The facts of one run; `AgentRunResult` adds views of them.

    Times are UTC; `duration_seconds` is `end_time - start_time`. `error` is set exactly when
    the status is `error`. `stop_reason` and `status` are None while the run is active.
    `last_error` is the newest error of the execution's steps where the run did not complete.
    `usage` and `cost_usd` are the run's own, `below_usage` and `below_cost_usd` those of the runs
    that its calls have started, and of all below these.
    `agent_name` is the agent that has the run now, or had it last; `handoffs` are those before.
    With `price_estimated` some of the cost is by the default price: no table has its model.
    `structured` is JSON data that fits the schema of the name `schema_name`; the schema itself
    is never part of a result.
    """

    # Computed fields of `to_dict` are accepted again.
    model_config = ConfigDict(extra="ignore")

    run_id: str
    agent_name: str
    model: str | None = None
    lifecycle: Lifecycle
    stop_reason: StopReason | None = None
    status: RunStatus | None = None
    output: str | None = None
    structured: Any = None
    schema_name: str | None = None
    steps: tuple[StepResult, ...] = ()
    handoffs: tuple[Handoff, ...] = ()
    usage: UsageStats = UsageStats()
    cost_usd: float = 0.0
    below_usage: UsageStats = UsageStats()
    below_cost_usd: float = 0.0
    cumulative_execution_seconds: float = 0.0
    start_time: datetime
    end_time: datetime | None = None
    error: str | None = None
    last_error: LastError | None = None
    max_iterations: int
    batch_id: str | None = None
    line_id: str | None = None
    row: int | None = None
    tenant: str | None = None
    parent_agent_id: str | None = None
    origin: RunOrigin | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)
    outcome: ContinuationOutcome | None = None
    lost_attempts: tuple[LostAttempt, ...] = ()
    price_estimated: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the facts as plain JSON-ready data; all names are in snake_case."""
        return self.model_dump(mode="json", by_alias=False)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def steps_used(self) -> int:
        """How many steps were committed."""
        return len(self.steps)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def success(self) -> bool:
        """Whether the run completed."""
        return self.status is RunStatus.COMPLETED

    @computed_field  # type: ignore[prop-decorator]
    @property
    def tool_calls_by_name(self) -> dict[str, int]:
        """How often each tool was called."""
        return dict(Counter(call.tool_name for step in self.steps for call in step.tool_calls))

    @computed_field  # type: ignore[prop-decorator]
    @property
    def tool_calls_total(self) -> int:
        """How many tool calls there were."""
        return sum(len(step.tool_calls) for step in self.steps)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def duration_seconds(self) -> float | None:
        """Seconds from start to end; None while the run is active."""
        return (self.end_time - self.start_time).total_seconds() if self.end_time else None

    @property
    def total_usage(self) -> UsageStats:
        """What the run and all runs below it have used."""
        return self.usage + self.below_usage

    @property
    def total_cost_usd(self) -> float:
        """What the run and all runs below it have cost."""
        return sum_usd(self.cost_usd, self.below_cost_usd)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def lost_cost_usd(self) -> float:
        """What calls of attempts that were not committed have cost, or may have."""
        paid = (one.cost_usd or 0.0 for one in self.lost_attempts if one.may_be_paid)
        return sum_usd(*paid)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def usage_estimated(self) -> bool:
        """Whether tokens and cost hold estimates, since some call came without its usage."""
        return any(step.usage_estimated for step in self.steps)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the model ended its last answer; None before the first one."""
        return self.steps[-1].finish_reason if self.steps else None

    @property
    def is_estimate(self) -> bool:
        """Whether the cost is an estimate: of estimated tokens, or by the default price."""
        return self.price_estimated or self.usage_estimated

    @property
    def shortened(self) -> str:
        """Why the answer of a completed run is not all that the model had to say; "" if it is."""
        if self.status is not RunStatus.COMPLETED or self.finish_reason is None:
            return ""
        return SHORTENED.get(self.finish_reason, "")

    @property
    def saved_usd(self) -> float:
        """The known cost of the calls that the response cache answered (USD)."""
        return sum(step.cache.saved_usd for step in self.steps if step.cache)

    @property
    def cause(self) -> Cause | None:
        """Why the run ended without completing; None while it is active and where it completed."""
        if self.stop_reason is None or self.status is RunStatus.COMPLETED:
            return None
        return cause_of_end(self.stop_reason, self.error, self.last_error, self.model)

    @property
    def explaining(self) -> LastError | None:
        """The last error, where it explains the end."""
        return explains(self.stop_reason, self.last_error) if self.stop_reason else None

    @property
    def last_failure(self) -> ErrorInfo | None:
        """The first error of the last step, when that step failed."""
        errors = self.steps[-1].errors if self.steps else ()
        return errors[0] if errors else None
