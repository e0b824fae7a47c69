"""Observations of work as values: model calls, tool calls, attempts at steps, refused messages.

Times are nanoseconds since the epoch by Redis's clock, so that spans of several workers fit.
"""

from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from time import perf_counter_ns

from stepfleet.orchestrator.protocol.claim import Claim, Refused
from stepfleet.orchestrator.protocol.verdict import Verdict
from stepfleet.orchestrator.protocol.waiting import TakenCall
from stepfleet.orchestrator.records.responses import LLMResponse, ModelRequest

CANCELLED = "CANCELLED"
"""Code of a cancelled call: no failure of its own."""


@dataclass(frozen=True, slots=True)
class ModelCallObservation:
    """One model call. `code` and `kind` name its failure; both are empty when it answered."""

    span_id: int
    began: int
    ended: int
    request: ModelRequest
    response: LLMResponse | None = None
    code: str = ""
    kind: str = ""

    @property
    def provider_and_model(self) -> tuple[str, str]:
        """The provider's name, empty for an agent's own model object, and the model's."""
        provider, colon, name = self.request.model.partition(":")
        return (provider, name) if colon else ("", provider)


@dataclass(frozen=True, slots=True)
class ToolCallObservation:
    """One execution of a tool. `name` is empty where the agent has no such tool."""

    span_id: int
    began: int
    ended: int
    name: str
    call_id: str
    attempt: int = 1
    code: str = ""


@dataclass(frozen=True, slots=True)
class StepObservation:
    """One attempt at a step, with the calls that were made in it. `applied`: it was committed."""

    claim: Claim
    verdict: Verdict
    calls: tuple[ModelCallObservation | ToolCallObservation, ...]
    began: int
    ended: int
    applied: bool


@dataclass(frozen=True, slots=True)
class ToolTaskObservation:
    """One tool call that was a task of its own. `applied`: its run has the result."""

    taken: TakenCall
    calls: tuple[ModelCallObservation | ToolCallObservation, ...]
    applied: bool


@dataclass(frozen=True, slots=True)
class RefusalObservation:
    """A message whose step was not given to this worker."""

    why: Refused


Observation = StepObservation | ToolTaskObservation | RefusalObservation


@dataclass(slots=True)
class Attempt:
    """The current work: its clock, and the calls that were observed in it so far."""

    run_id: str
    began: int
    mark: int
    calls: list[ModelCallObservation | ToolCallObservation] = field(default_factory=list)

    @property
    def now(self) -> int:
        """Redis's time now: that of the claim, carried on by the monotonic clock."""
        return self.began + perf_counter_ns() - self.mark


_current: ContextVar[Attempt | None] = ContextVar("stepfleet_attempt", default=None)


def begin(run_id: str, now: datetime) -> Attempt:
    """Set the current work of this task; its tools and threads share it."""
    attempt = Attempt(run_id, nanoseconds(now), perf_counter_ns())
    _current.set(attempt)
    return attempt


def current_attempt(run_id: str | None = None) -> Attempt | None:
    """Return the current work, if there is any and it is that run's."""
    attempt = _current.get()
    return attempt if attempt and run_id in (None, attempt.run_id) else None


def nanoseconds(moment: datetime) -> int:
    """Return a time as nanoseconds since the epoch, exact to the microsecond."""
    return round(moment.timestamp() * 1_000_000) * 1000
