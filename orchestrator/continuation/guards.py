"""Guards: criteria that forbid going on. Each compares one fact of the state with its limit.

Failures are judged elsewhere, in `errors`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any, Protocol, runtime_checkable

from stepfleet.orchestrator.records.outcome import (
    ContinuationDecision,
    ContinuationEvaluation,
    StopReason,
)
from stepfleet.orchestrator.records.state import AgentState
from stepfleet.orchestrator.records.steps import FinishReason
from stepfleet.orchestrator.records.usage import sum_usd

FORBID = ContinuationDecision.FORBID_CONTINUATION
ALLOW = ContinuationDecision.ALLOW_CONTINUATION
REQUEST = ContinuationDecision.REQUEST_CONTINUATION
STOP = ContinuationDecision.ALLOW_STOP


@runtime_checkable
class CanDecideToContinue(Protocol):
    """A criterion: guards forbid or allow, work drivers request or stop."""

    def decide(self, state: AgentState) -> ContinuationDecision:
        """Return this criterion's decision on `state`."""


@runtime_checkable
class CanExplainContinuation(Protocol):
    """A criterion that gives its decision with a reason and the numbers behind it."""

    def explain(self, state: AgentState) -> ContinuationEvaluation:
        """Return the decision on `state`, explained."""


def explains(criterion: object) -> bool:
    """Return whether a criterion gives reasons (the protocol's own check is slow)."""
    return callable(getattr(criterion, "explain", None))


def evaluation(
    criterion: object,
    decision: ContinuationDecision,
    reason: str,
    context: dict[str, Any],
    stop_reason: StopReason | None = None,
) -> ContinuationEvaluation:
    """Return an evaluation by `criterion`; the values are known to be valid."""
    # In the order in which they are stored.
    return ContinuationEvaluation.of_fields(
        {
            "stop_reason": stop_reason,
            "traceback": None,
            "criterion": type(criterion).__name__,
            "decision": decision,
            "reason": reason,
            "context": context,
        }
    )


Number = int | float


class Maximum(ABC):
    """A guard that forbids when a measure of the state has reached `maximum`.

    A run that has nothing left to do completes all the same (see `collection`).
    """

    what = ""
    unit = ""
    stop_reason = StopReason.GUARD

    def __init__(self, maximum: Number) -> None:
        if not (maximum > 0 and math.isfinite(maximum)):
            msg = (
                f"{type(self).__name__}: the limit must be a finite number above 0, and is "
                f"{maximum}; leave the criterion out for no limit"
            )
            raise ValueError(msg)
        self.maximum = maximum

    @abstractmethod
    def measure(self, state: AgentState) -> Number:
        """Return the number that is compared."""

    def below(self, state: AgentState) -> Number:  # noqa: ARG002 - most measures have no such part
        """Return how much of the measure is that of runs that this one has started."""
        return 0

    def lost(self, state: AgentState) -> Number:  # noqa: ARG002 - most measures have no such part
        """Return how much of the measure is that of attempts that were not committed."""
        return 0

    def decide(self, state: AgentState) -> ContinuationDecision:
        """Forbid at the limit and above, allow below."""
        return FORBID if self.measure(state) >= self.maximum else ALLOW

    def explain(self, state: AgentState) -> ContinuationEvaluation:
        """Return the decision with both numbers."""
        value, decision = self.measure(state), self.decide(state)
        reached, unit = decision is FORBID, self.unit
        relation = "has reached" if reached else "is below"
        context = {"value": value, "limit": self.maximum}
        of_them = ""
        if parts := self._parts(state):
            told = [f"{_shown(part)}{unit} of them {_PARTS[name]}" for name, part in parts.items()]
            of_them = f" ({', '.join(told)})"
            context |= parts
        return evaluation(
            self,
            decision,
            f"{self.what}: {_shown(value)}{unit}{of_them} {relation} the limit of "
            f"{_shown(self.maximum)}{unit}",
            context,
            self.stop_reason if reached else None,
        )

    def _parts(self, state: AgentState) -> dict[str, Number]:
        below, lost = self.below(state), self.lost(state)
        if not below and not lost:
            return {}
        return {name: part for name, part in (("below", below), ("lost", lost)) if part}

    def idle(self, reached: ContinuationEvaluation) -> ContinuationEvaluation:
        """Return the evaluation `reached` in the words of a limit that prevented nothing."""
        value, unit = reached.context.get("value", self.maximum), self.unit
        numbers = f"{_shown(value)}{unit} of {_shown(self.maximum)}{unit}"
        reason = f"{self.what}: {numbers}, nothing was left to do"
        return reached.model_copy(update={"reason": reason})


_PARTS = {"below": "of runs below it", "lost": "of attempts that were not committed"}


def _shown(number: Number) -> str:
    return str(number) if isinstance(number, int) else f"{number:.6g}"


class StepsLimit(Maximum):
    """Forbids when the execution has made `maximum` steps."""

    what = "steps"
    stop_reason = StopReason.STEPS_LIMIT

    def measure(self, state: AgentState) -> Number:
        """Return the steps of this execution."""
        return state.step_count


class TokenUsageLimit(Maximum):
    """Forbids when the execution, and all runs below it, have used `maximum` tokens.

    With those of its attempts that were not committed, as far as they were or may have been paid.
    """

    what = "tokens"
    stop_reason = StopReason.TOKEN_LIMIT

    def measure(self, state: AgentState) -> Number:
        """Return the tokens of this execution."""
        return state.usage.total_tokens + self.below(state) + self.lost(state)

    def below(self, state: AgentState) -> Number:
        """Return the tokens of the runs below."""
        return state.below_usage.total_tokens

    def lost(self, state: AgentState) -> Number:
        """Return the tokens of attempts that were not committed."""
        return state.lost.tokens


class CumulativeExecutionTimeLimit(Maximum):
    """Forbids when the steps of the execution have taken `maximum` seconds together."""

    what = "time in steps"
    unit = " s"
    stop_reason = StopReason.TIME_LIMIT

    def measure(self, state: AgentState) -> Number:
        """Return the cumulative execution time in seconds."""
        return state.info.cumulative_execution_seconds


class ExecutionTimeLimit(Maximum):
    """Forbids when `maximum` whole seconds have passed since the execution started.

    Compares with the state's own moment, which is Redis's time, unless a clock is given.
    """

    what = "time since start"
    unit = " s"
    stop_reason = StopReason.TIME_LIMIT

    def __init__(self, maximum: Number, clock: Callable[[], datetime] | None = None) -> None:
        super().__init__(maximum)
        self._clock = clock

    def measure(self, state: AgentState) -> Number:
        """Return the whole seconds since the execution, or else the session, started."""
        now = self._clock() if self._clock else state.info.updated_at
        started = state.info.execution_started_at or state.info.started_at
        return int((now - started).total_seconds())


class BudgetLimit(Maximum):
    """Forbids when the execution, and all runs below it, have cost `maximum` US dollars.

    With its attempts that were not committed, as far as they were or may have been paid.
    """

    what = "cost"
    unit = " USD"

    def measure(self, state: AgentState) -> Number:
        """Return the cost of this execution in USD."""
        return sum_usd(state.cost_usd, self.below(state), self.lost(state))

    def below(self, state: AgentState) -> Number:
        """Return the cost of the runs below in USD."""
        return state.below_cost_usd

    def lost(self, state: AgentState) -> Number:
        """Return the cost of attempts that were not committed in USD."""
        return state.lost.cost_usd


class FinishReasonCheck:
    """Forbids when the model stopped writing for one of the given finish reasons.

    Raises `ValueError` on a reason that `FinishReason` does not have.
    """

    def __init__(self, reasons: Iterable[FinishReason] = ()) -> None:
        self.reasons = frozenset(FinishReason(reason) for reason in reasons)
        self._named = sorted(reason.value for reason in self.reasons)

    def decide(self, state: AgentState) -> ContinuationDecision:
        """Forbid on a configured reason, else allow."""
        last = state.current_step
        return FORBID if last is not None and last.finish_reason in self.reasons else ALLOW

    def explain(self, state: AgentState) -> ContinuationEvaluation:
        """Return the decision with the reason that was found."""
        decision = self.decide(state)
        found = state.current_step.finish_reason.value if state.current_step else None
        word = "is one that ends the run" if decision is FORBID else "does not end the run"
        return evaluation(
            self,
            decision,
            f"finish reason {found or 'none yet'} {word}",
            {"finish_reason": found, "ends_on": list(self._named)},
            StopReason.FINISH_REASON if decision is FORBID else None,
        )


class StopRequested:
    """Forbids when a cancel of the run was requested."""

    def decide(self, state: AgentState) -> ContinuationDecision:
        """Forbid on a recorded cancel."""
        return FORBID if state.stop_requested is not None else ALLOW

    def explain(self, state: AgentState) -> ContinuationEvaluation:
        """Return the decision with the note that came with the cancel."""
        if state.stop_requested is None:
            return evaluation(self, ALLOW, "no cancel was requested", {})
        return self.because(state.stop_requested)

    @classmethod
    def because(cls, note: str) -> ContinuationEvaluation:
        """Return the evaluation of a run whose cancel came with `note`."""
        reason = f"cancelled on request: {note}" if note else "cancelled on request"
        return evaluation(cls(), FORBID, reason, {"note": note}, StopReason.USER_REQUESTED)
