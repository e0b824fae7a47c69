"""What a stop reason amounts to: the status that a caller sees, and the end state of the run."""

from enum import StrEnum

from stepfleet.orchestrator.records.outcome import StopReason
from stepfleet.orchestrator.records.state import Lifecycle


class RunStatus(StrEnum):
    """The four ways in which a run ends, derived from its stop reason."""

    COMPLETED = "completed"
    MAX_ITERATIONS_REACHED = "max_iterations_reached"
    ERROR = "error"
    CANCELLED = "cancelled"


_STATUS = {
    StopReason.COMPLETED: RunStatus.COMPLETED,
    StopReason.FINISH_REASON: RunStatus.COMPLETED,
    StopReason.STEPS_LIMIT: RunStatus.MAX_ITERATIONS_REACHED,
    StopReason.TOKEN_LIMIT: RunStatus.MAX_ITERATIONS_REACHED,
    StopReason.TIME_LIMIT: RunStatus.MAX_ITERATIONS_REACHED,
    StopReason.ERROR: RunStatus.ERROR,
    StopReason.RETRY_LIMIT: RunStatus.ERROR,
    StopReason.GUARD: RunStatus.ERROR,
    StopReason.USER_REQUESTED: RunStatus.CANCELLED,
}

_LIFECYCLE = {
    StopReason.COMPLETED: Lifecycle.COMPLETED,
    StopReason.FINISH_REASON: Lifecycle.COMPLETED,
    StopReason.STEPS_LIMIT: Lifecycle.STOPPED,
    StopReason.TOKEN_LIMIT: Lifecycle.STOPPED,
    StopReason.TIME_LIMIT: Lifecycle.STOPPED,
    StopReason.GUARD: Lifecycle.STOPPED,
    StopReason.ERROR: Lifecycle.FAILED,
    StopReason.RETRY_LIMIT: Lifecycle.FAILED,
    StopReason.USER_REQUESTED: Lifecycle.CANCELLED,
}


def run_status(reason: StopReason) -> RunStatus:
    """Return the status that `reason` amounts to."""
    return _STATUS[reason]


def end_state(reason: StopReason) -> Lifecycle:
    """Return the end state that `reason` amounts to."""
    return _LIFECYCLE[reason]
