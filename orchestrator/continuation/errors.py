"""The guard that applies the error policy."""

from stepfleet.orchestrator.continuation.error_policy import (
    ErrorContextResolver,
    ErrorHandlingDecision,
    ErrorPolicy,
    resolve,
)
from stepfleet.orchestrator.continuation.guards import ALLOW, FORBID, evaluation
from stepfleet.orchestrator.records.errors import ErrorContext
from stepfleet.orchestrator.records.outcome import (
    ContinuationDecision,
    ContinuationEvaluation,
    StopReason,
)
from stepfleet.orchestrator.records.state import AgentState


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
        if exhausted:
            follows = f"retries are used up (max_retries={self.policy.max_retries})"
        elif failures.permanent:
            follows = "which no repetition mends"
        else:
            follows = f"the policy says {handling.value}"
        where = f" in tool {failures.tool_name}" if failures.tool_name else ""
        code = f" ({failures.code})" if failures.code else ""
        return (
            f"{failures.type.value} error{code}{where}, failure {failures.consecutive_failures} "
            f"in a row, {follows}: {failures.message or 'no message'}"
        )
