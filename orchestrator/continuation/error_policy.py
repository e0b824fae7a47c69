"""The error policy: stop, retry or ignore a failed step, per type of error. Pure.

Presets and numbers follow the error policies of the framework's third design document: `n`
is the consecutive failure at which a retried type stops, so `retry_tool_errors(3)` makes
three attempts in all.
"""

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Self

from pydantic import Field

from stepfleet.orchestrator.continuation.guards import ALLOW, FORBID, evaluation
from stepfleet.orchestrator.records.base import Record
from stepfleet.orchestrator.records.errors import ErrorContext, ErrorInfo, ErrorType
from stepfleet.orchestrator.records.outcome import (
    ContinuationDecision,
    ContinuationEvaluation,
    StopReason,
)
from stepfleet.orchestrator.records.state import AgentState
from stepfleet.orchestrator.records.steps import StepResult, StepType

SEVERITY = (
    ErrorType.RATE_LIMIT,
    ErrorType.TIMEOUT,
    ErrorType.MODEL,
    ErrorType.TOOL,
    ErrorType.VALIDATION,
    ErrorType.UNKNOWN,
)
"""When several things failed in one step, the first of these types is the step's."""

ErrorContextResolver = Callable[[AgentState], ErrorContext]


class ErrorHandlingDecision(StrEnum):
    """The handling of a failure."""

    STOP = "stop"
    RETRY = "retry"
    IGNORE = "ignore"


STOP, RETRY, IGNORE = ErrorHandlingDecision


class ErrorPolicy(Record):
    """One decision per type of error, and the consecutive failure at which retrying stops.

    The default, `stop_on_any_error()`, ends a run at its first failed step. A permanent failure of
    a model call (`ErrorContext.permanent`: a bad key, a missing model, ...) stops under every
    policy, since the same call would meet it again.
    """

    tool: ErrorHandlingDecision = STOP
    model: ErrorHandlingDecision = STOP
    validation: ErrorHandlingDecision = STOP
    rate_limit: ErrorHandlingDecision = STOP
    timeout: ErrorHandlingDecision = STOP
    unknown: ErrorHandlingDecision = STOP
    max_retries: int = Field(default=0, ge=0)

    @classmethod
    def stop_on_any_error(cls) -> Self:
        """Stop at any failure."""
        return cls()

    @classmethod
    def retry_tool_errors(cls, max_retries: int = 3) -> Self:
        """Retry failures that the model or time can fix; stop at other failures."""
        return cls(
            tool=RETRY, validation=RETRY, rate_limit=RETRY, timeout=RETRY, max_retries=max_retries
        )

    @classmethod
    def ignore_tool_errors(cls) -> Self:
        """Let the model see tool failures and go on; stop at model failures."""
        return cls(tool=IGNORE, validation=IGNORE, rate_limit=RETRY, timeout=RETRY, unknown=IGNORE)

    @classmethod
    def retry_all(cls, max_retries: int = 5) -> Self:
        """Retry any failure that is not permanent."""
        every = {error_type.value: RETRY for error_type in ErrorType}
        return cls.model_validate({**every, "max_retries": max_retries})

    def with_max_retries(self, max_retries: int) -> Self:
        """Return a copy that stops at the `max_retries`-th failure in a row."""
        return type(self).model_validate({**self.model_dump(), "max_retries": max_retries})

    def with_handling(self, error_type: ErrorType, decision: ErrorHandlingDecision) -> Self:
        """Return a copy that handles one type of error by `decision`."""
        changed = {**self.model_dump(), ErrorType(error_type).value: decision}
        return type(self).model_validate(changed)

    def with_tool_error_handling(self, decision: ErrorHandlingDecision) -> Self:
        """Return a copy that handles tool errors by `decision`."""
        return self.with_handling(ErrorType.TOOL, decision)

    def handling(self, error_type: ErrorType) -> ErrorHandlingDecision:
        """Return the handling of a type of error, regardless of earlier attempts."""
        decision: ErrorHandlingDecision = getattr(self, error_type.value)
        return decision

    def is_exhausted(self, failures: ErrorContext) -> bool:
        """Return whether retrying was allowed and is used up."""
        return (
            failures.consecutive_failures > 0
            and not failures.permanent
            and self.handling(failures.type) is RETRY
            and failures.consecutive_failures >= self.max_retries
        )

    def decide(self, failures: ErrorContext) -> ErrorHandlingDecision:
        """Return the handling of the failures so far; `ignore` when there are none."""
        if failures.consecutive_failures == 0:
            return IGNORE
        if failures.permanent or self.is_exhausted(failures):
            return STOP
        return self.handling(failures.type)


def classify(errors: Sequence[ErrorInfo]) -> ErrorInfo | None:
    """Return the failure that names a step's error: the severest type, then the first in order."""
    return min(errors, key=lambda error: SEVERITY.index(error.type), default=None)


def next_failures(previous: ErrorContext, step: StepResult) -> ErrorContext:
    """Return the failures of an execution after `step`."""
    if step.type is not StepType.ERROR:
        if previous.consecutive_failures == 0:
            return previous
        return ErrorContext(total_failures=previous.total_failures)
    worst = classify(step.errors)
    return ErrorContext(
        type=worst.type if worst else ErrorType.UNKNOWN,
        consecutive_failures=previous.consecutive_failures + 1,
        total_failures=previous.total_failures + 1,
        message=worst.message if worst else None,
        tool_name=worst.tool_name if worst else None,
        metadata={"code": worst.code} if worst else {},
    )


def resolve(state: AgentState) -> ErrorContext:
    """Return the failures as the state has counted them: the default resolver."""
    return state.failures


class ErrorPolicyCriterion:
    """Forbids when the policy stops; a retry or an ignored failure is allowed.

    The stop reason is `retry_limit` when retrying was allowed and is used up, else `error`.
    """

    def __init__(self, policy: ErrorPolicy, resolver: ErrorContextResolver = resolve) -> None:
        self.policy = policy
        self.resolver = resolver

    def decide(self, state: AgentState) -> ContinuationDecision:
        """Forbid on stop."""
        stops = self.policy.decide(self.resolver(state)) is ErrorHandlingDecision.STOP
        return FORBID if stops else ALLOW

    def explain(self, state: AgentState) -> ContinuationEvaluation:
        """Return the decision with the failure, the counts and the handling."""
        failures = self.resolver(state)
        handling = self.policy.decide(failures)
        forbids = handling is ErrorHandlingDecision.STOP
        exhausted = self.policy.is_exhausted(failures)
        stop_reason = StopReason.RETRY_LIMIT if exhausted else StopReason.ERROR
        context = {
            "errorType": failures.type.value,
            "consecutiveFailures": failures.consecutive_failures,
            "totalFailures": failures.total_failures,
            "maxRetries": self.policy.max_retries,
            "handling": handling.value,
            "toolName": failures.tool_name,
        }
        if failures.code:
            context["errorCode"] = failures.code
        return evaluation(
            self,
            FORBID if forbids else ALLOW,
            self._reason(failures, handling, exhausted=exhausted),
            context,
            stop_reason if forbids else None,
        )

    def _reason(
        self, failures: ErrorContext, handling: ErrorHandlingDecision, *, exhausted: bool
    ) -> str:
        if failures.consecutive_failures == 0:
            return "the last step did not fail"
        where = f" in tool {failures.tool_name}" if failures.tool_name else ""
        code = f" {failures.code}" if failures.code else ""
        follows = f"failure {failures.consecutive_failures} in a row, "
        if exhausted:
            follows += f"max_retries={self.policy.max_retries} reached"
        elif failures.permanent:
            follows = "permanent, not retried"
        else:
            follows += f"the policy says {handling.value}"
        what = f"{failures.type.value} error{code}{where} ({follows})"
        return f"{what}: {failures.message or 'no message'}"
