"""Exceptions of `raise_for_status` and `structured_as`."""

from stepfleet.orchestrator.records.errors import AgentException
from stepfleet.orchestrator.records.run.facts import RunFacts, RunStatus


class _WithResult(AgentException):
    """The root of exceptions that carry a run's result."""

    def __init__(self, message: str = "", *, result: RunFacts | None = None) -> None:
        super().__init__(message)
        self.result = result


class MaxStepsExceeded(_WithResult):
    """A run stopped at a limit of steps, tokens or time; `result` is its result."""

    code = "MAX_ITERATIONS_EXCEEDED"


class RunFailed(_WithResult):
    """A run ended in error or was cancelled; `result` is its result.

    `code`, `type` and `retryable` are those of the failure that ended it, where one did.
    """

    def __init__(self, message: str = "", *, result: RunFacts | None = None) -> None:
        super().__init__(message, result=result)
        failure = result.last_failure if result else None
        if failure is not None:
            self.code = failure.code
            self.type = failure.type
            self.retryable = failure.retryable


class RunActive(_WithResult):
    """A run has not ended yet; `result` is its result so far."""

    retryable = True


class StructuredDataError(AgentException):
    """A result holds no structured data of the expected kind; the message names the place."""

    code = "VALIDATION_ERROR"


def check_ended_well(facts: RunFacts) -> None:
    """Raise the exception that fits a run which did not complete; else do nothing."""
    run = f"run {facts.run_id} of agent {facts.agent_name!r}"
    why = facts.outcome.reason if facts.outcome else None
    match facts.status:
        case RunStatus.COMPLETED:
            return
        case None:
            raise RunActive(f"{run} is {facts.lifecycle.value}: wait for its end", result=facts)
        case RunStatus.MAX_ITERATIONS_REACHED:
            reason = why or (facts.stop_reason.value if facts.stop_reason else "a limit")
            if facts.explaining is not None:
                reason = f"{reason}; {facts.explaining}"
            raise MaxStepsExceeded(
                f"{run} stopped after {facts.steps_used} steps: {reason}", result=facts
            )
        case RunStatus.CANCELLED:
            raise RunFailed(f"{run} was cancelled: {why or 'on request'}", result=facts)
        case RunStatus.ERROR:
            raise RunFailed(f"{run} failed: {facts.error or why or 'no reason'}", result=facts)
