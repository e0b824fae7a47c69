"""Whether a run goes on, and why: decisions, evaluations, the outcome, the nine stop reasons.

The rules that produce them live in `stepfleet.orchestrator.continuation`.
"""

import operator
from enum import StrEnum
from typing import Any

from pydantic import ConfigDict, Field
from pydantic.alias_generators import to_camel

from stepfleet.orchestrator.records.base import Record


class RunAnswer(Record):
    """The answer of an execution under an answer contract.

    `final` means that nothing is missing any more. Before that, `text` is an answer whose data
    is still awaited. `structured` fits the schema of the name `schema_name`.
    """

    text: str | None = None
    structured: Any = None
    schema_name: str | None = None
    final: bool = False


class ContinuationDecision(StrEnum):
    """A criterion's decision. Guards forbid or allow; work drivers request or stop."""

    FORBID_CONTINUATION = "forbid"
    ALLOW_CONTINUATION = "allow"
    REQUEST_CONTINUATION = "request"
    ALLOW_STOP = "stop"


class StopReason(StrEnum):
    """Why an execution stopped."""

    COMPLETED = "completed"
    STEPS_LIMIT = "steps_limit"
    TOKEN_LIMIT = "token_limit"  # noqa: S105 - tokens of text
    TIME_LIMIT = "time_limit"
    RETRY_LIMIT = "retry_limit"
    ERROR = "error"
    FINISH_REASON = "finish_reason"
    GUARD = "guard"
    USER_REQUESTED = "user_requested"


class _Wire(Record):
    """Camel-case names on the wire; both spellings are read."""

    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, serialize_by_alias=True
    )


class ContinuationEvaluation(_Wire):
    """One criterion's decision, with its reason and the numbers it compared."""

    criterion: str
    decision: ContinuationDecision
    reason: str
    context: dict[str, Any] = Field(default_factory=dict)
    stop_reason: StopReason | None = None
    traceback: str | None = Field(default=None, exclude_if=operator.not_)
    """Where a criterion of the user's failed."""

    @classmethod
    def from_decision(
        cls, criterion: str, decision: ContinuationDecision
    ) -> "ContinuationEvaluation":
        """Return an evaluation with a default reason made of the criterion's short name."""
        short = criterion.rpartition(".")[2]
        verb = {
            ContinuationDecision.FORBID_CONTINUATION: "forbade continuation",
            ContinuationDecision.ALLOW_CONTINUATION: "allows continuation",
            ContinuationDecision.REQUEST_CONTINUATION: "requested continuation",
            ContinuationDecision.ALLOW_STOP: "has no more work and allows the stop",
        }[decision]
        return cls(criterion=short, decision=decision, reason=f"{short} {verb}")


class ContinuationOutcome(_Wire):
    """All evaluations of one moment and their result.

    `stop_reason` is meaningful only when `should_continue` is false.
    """

    decision: ContinuationDecision
    should_continue: bool
    resolved_by: str
    stop_reason: StopReason = StopReason.COMPLETED
    evaluations: tuple[ContinuationEvaluation, ...] = ()

    def get_forbidding_criterion(self) -> str | None:
        """Return the name of the first criterion that forbade, or None."""
        for evaluation in self.evaluations:
            if evaluation.decision is ContinuationDecision.FORBID_CONTINUATION:
                return evaluation.criterion
        return None

    def get_evaluation_for(self, criterion: str) -> ContinuationEvaluation | None:
        """Return the evaluation of the criterion of that short name, or None."""
        return next((one for one in self.evaluations if one.criterion == criterion), None)

    @property
    def broken(self) -> tuple[ContinuationEvaluation, ...]:
        """The evaluations of criteria that failed by themselves, in code of the user's."""
        return tuple(one for one in self.evaluations if one.traceback)

    @property
    def reason(self) -> str:
        """The reason in words: that of the criterion which resolved the outcome, if one did."""
        for evaluation in self.evaluations:
            named = evaluation.criterion == self.resolved_by
            if named and evaluation.decision is self.decision:
                return evaluation.reason
        if self.should_continue:
            return "no criterion forbade more work"
        if self.stop_reason is StopReason.ERROR:
            return "the last step failed and no criterion requested another"
        return "no criterion requested more work"


def brief(outcome: ContinuationOutcome) -> dict[str, Any]:
    """Return an outcome without its evaluations, as JSON data."""
    return {
        "should_continue": outcome.should_continue,
        "stop_reason": None if outcome.should_continue else outcome.stop_reason.value,
        "resolved_by": outcome.resolved_by,
    }
