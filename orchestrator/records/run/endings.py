"""Stop reasons as the status that a caller sees, and as the end state of the run."""

from enum import StrEnum

from stepfleet.orchestrator.records.outcome import StopReason
from stepfleet.orchestrator.records.state import Lifecycle


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
