"""The criteria that every run has, in order."""

from collections.abc import Iterable

from stepfleet.orchestrator.continuation.collection import ContinuationCriteria
from stepfleet.orchestrator.continuation.drivers import PendingRetry, ToolCallPresenceCheck
from stepfleet.orchestrator.continuation.error_policy import (
    ErrorContextResolver,
    ErrorPolicy,
    resolve,
)
from stepfleet.orchestrator.continuation.errors import ErrorPolicyCriterion
from stepfleet.orchestrator.continuation.guards import (
    BudgetLimit,
    CanDecideToContinue,
    CumulativeExecutionTimeLimit,
    ExecutionTimeLimit,
    FinishReasonCheck,
    StepsLimit,
    StopRequested,
    TokenUsageLimit,
)
from stepfleet.orchestrator.records.steps import FinishReason


def base_criteria(  # noqa: PLR0913 - one argument per limit
    *,
    max_steps: int = 10,
    token_limit: int | None = 32_768,
    time_limit: float | None = 300.0,
    cumulative_timeout: float | None = None,
    budget_usd: float | None = None,
    error_policy: ErrorPolicy | None = None,
    finish_reasons: Iterable[FinishReason] = (),
    resolver: ErrorContextResolver = resolve,
    leading: Iterable[CanDecideToContinue] = (),
    extra: Iterable[CanDecideToContinue] = (),
) -> ContinuationCriteria:
    """Return the base set with these limits, followed by the user's criteria.

    A cumulative timeout replaces the wall-clock limit; None switches a limit off. `leading`
    stands before the limits: the criteria of an agent's reasoner for its answer.
    """
    policy = error_policy or ErrorPolicy()
    # First, so that a cancelled run ends as cancelled whatever else forbids.
    criteria: list[CanDecideToContinue] = [StopRequested(), *leading, StepsLimit(max_steps)]
    if token_limit is not None:
        criteria.append(TokenUsageLimit(token_limit))
    if cumulative_timeout is not None:
        criteria.append(CumulativeExecutionTimeLimit(cumulative_timeout))
    elif time_limit is not None:
        criteria.append(ExecutionTimeLimit(time_limit))
    criteria += [
        ErrorPolicyCriterion(policy, resolver),
        FinishReasonCheck(finish_reasons),
        ToolCallPresenceCheck(),
        PendingRetry(policy, resolver),
    ]
    if budget_usd is not None:
        criteria.append(BudgetLimit(budget_usd))
    return ContinuationCriteria(*criteria, *extra)
