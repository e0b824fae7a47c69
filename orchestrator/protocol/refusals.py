"""Records of tool calls that were not executed, or whose outcome is unknown."""

from datetime import datetime

from stepfleet.orchestrator.protocol.attempt import Interruption
from stepfleet.orchestrator.records.errors import ErrorType
from stepfleet.orchestrator.records.tools import (
    NOT_EXECUTED,
    ToolCall,
    ToolCallRecord,
    refused,
)

_WHY = {
    Interruption.CANCELLED: "the run was cancelled before this call was finished",
    Interruption.TIMED_OUT: "the step's time limit ended this call",
    Interruption.TERMINATED: "this call's task was revoked and terminated",
    Interruption.HANDED_BACK: "the worker stopped before this call was finished",
    Interruption.LEASE_LOST: "another worker took this step over",
}


def not_run(call: ToolCall, by: Interruption, at: datetime) -> ToolCallRecord:
    """Return the record of a call that an interruption kept from finishing."""
    return refused(
        call,
        at,
        error_type=ErrorType.TIMEOUT if by.from_outside else ErrorType.TOOL,
        code="TIMEOUT_ERROR" if by.from_outside else NOT_EXECUTED,
        message=_WHY[by],
    )


def unknown_outcome(call: ToolCall, at: datetime) -> ToolCallRecord:
    """Return the record of a call that a lost worker had started and that must not run twice."""
    record = refused(
        call,
        at,
        code="OUTCOME_UNKNOWN",
        message=(
            "a worker was lost while this tool ran; whether it took effect is unknown, "
            "and it was not run again"
        ),
    )
    return record.model_copy(update={"repeated": True})


def waited_in_vain(call: ToolCall, at: datetime) -> ToolCallRecord:
    """Return the record of a call that had no result when the run's patience ended."""
    return refused(
        call,
        at,
        error_type=ErrorType.TIMEOUT,
        code="TIMEOUT_ERROR",
        message=(
            f"tool {call.name!r} had no result when the run's time limit had passed; start more "
            "workers for its queue, or raise time_limit"
        ),
    )


def gave_up(call: ToolCall, at: datetime, crashes: int) -> ToolCallRecord:
    """Return the record of a call that repeatedly ended its worker."""
    return refused(
        call,
        at,
        code="WORKER_LOST",
        message=f"tool {call.name!r} ended its worker {crashes} times; it is not tried again",
    )
