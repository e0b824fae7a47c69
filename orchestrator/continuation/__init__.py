"""Whether a run goes on: criteria, and how their decisions become one outcome. Pure."""

from stepfleet.orchestrator.continuation.collection import ContinuationCriteria, base_criteria
from stepfleet.orchestrator.continuation.drivers import (
    CallableCriterion,
    PendingRetry,
    ResponseContentCheck,
    SelfCritique,
    ToolCallPresenceCheck,
    when,
)
from stepfleet.orchestrator.continuation.error_policy import ErrorPolicyCriterion
from stepfleet.orchestrator.continuation.guards import (
    BudgetLimit,
    CanDecideToContinue,
    CanExplainContinuation,
    CumulativeExecutionTimeLimit,
    ExecutionTimeLimit,
    FinishReasonCheck,
    StepsLimit,
    StopRequested,
    TokenUsageLimit,
)

__all__ = [
    "BudgetLimit",
    "CallableCriterion",
    "CanDecideToContinue",
    "CanExplainContinuation",
    "ContinuationCriteria",
    "CumulativeExecutionTimeLimit",
    "ErrorPolicyCriterion",
    "ExecutionTimeLimit",
    "FinishReasonCheck",
    "PendingRetry",
    "ResponseContentCheck",
    "SelfCritique",
    "StepsLimit",
    "StopRequested",
    "TokenUsageLimit",
    "ToolCallPresenceCheck",
    "base_criteria",
    "when",
]
