"""The result of a finished (or running) run: its facts, and views of them."""

import json
from typing import NoReturn, TypeVar

from pydantic import TypeAdapter, ValidationError

from stepfleet.orchestrator.records.conversation.messages import Message
from stepfleet.orchestrator.records.errors import AgentException
from stepfleet.orchestrator.records.run.facts import (
    LostAttempt,
    LostKind,
    RunFacts,
    RunStatus,
    end_state,
    run_status,
)
from stepfleet.orchestrator.records.run.report import (
    DebugSummary,
    debugged,
    explained,
    replayed,
    summarized,
)
from stepfleet.orchestrator.records.run.trace import AgentStep, AgentTrace, added_messages, trace_of
from stepfleet.orchestrator.records.text.validation import explain_invalid

__all__ = ["AgentRunResult", "LostAttempt", "LostKind", "RunStatus", "end_state", "run_status"]


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


T = TypeVar("T")


class AgentRunResult(RunFacts):
    """Everything about one run; fetchable by `run_id` from anywhere, any time."""

    def summary(self) -> str:
        """Return one line: status, agent, steps, tool calls, tokens, duration in seconds."""
        return summarized(self)

    def debug(self) -> DebugSummary:
        """Return a summary: stop reason, errors, usage."""
        return debugged(self)

    def replay(self) -> str:
        """Return a readable trace of the run, a line or two per step."""
        return replayed(self)

    def explain(self) -> str:
        """Return the trace with every field of every step, and why the run stopped."""
        return explained(self)

    def trace(self, task: str | None = None) -> AgentTrace:
        """Return the run as a sequence of small typed steps; `task` is the run's input."""
        return trace_of(self, task)

    def agent_steps(self, task: str | None = None) -> tuple[AgentStep, ...]:
        """Return the steps of `trace(task)`."""
        return self.trace(task).steps

    def added_messages(self) -> tuple[Message, ...]:
        """Return the messages that the steps added, rebuilt: the conversation after its inputs."""
        return added_messages(self.steps)

    def structured_as(self, expected: type[T]) -> T:
        """Return the structured data as an `expected`, any type that pydantic can read.

        Raises `StructuredDataError` that names the place when there is no data, no schema, or
        data of another schema.
        """
        return _structured(self, expected)

    def raise_for_status(self) -> "AgentRunResult":
        """Return the result if the run completed.

        Raises `MaxStepsExceeded` when it stopped at a limit, `RunFailed` when it failed or was
        cancelled, `RunActive` when it has not ended; each carries this result.
        """
        check_ended_well(self)
        return self


def _structured(facts: RunFacts, expected: type[T]) -> T:
    """Return the structured data; a type with a name is only read from its own schema's data."""
    if facts.structured is None:
        _refuse(facts, "field '<root>' holds no structured data")
    if facts.schema_name is None:
        _refuse(facts, "field 'schema_name' is not set: the run had no completion schema")
    name = getattr(expected, "__name__", facts.schema_name)
    is_plain = getattr(expected, "__module__", "") == "builtins"
    if not is_plain and name != facts.schema_name:
        _refuse(facts, f"field '<root>' has the schema {facts.schema_name!r}, not {name!r}")
    try:
        return TypeAdapter(expected).validate_json(json.dumps(facts.structured))
    except ValidationError as error:
        _refuse(facts, explain_invalid(error))


def _refuse(facts: RunFacts, why: str) -> NoReturn:
    raise StructuredDataError(f"structured data of run {facts.run_id}: {why}") from None
