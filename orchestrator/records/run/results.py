"""The result of a finished (or running) run: its facts, and views of them."""

import json
from typing import NoReturn, TypeVar

from pydantic import TypeAdapter, ValidationError

from stepfleet.orchestrator.records.conversation.messages import Message
from stepfleet.orchestrator.records.run.facts import (
    LostAttempt,
    LostKind,
    RunFacts,
    RunStatus,
    end_state,
    run_status,
)
from stepfleet.orchestrator.records.run.raising import StructuredDataError, check_ended_well
from stepfleet.orchestrator.records.run.report import (
    DebugSummary,
    debugged,
    explained,
    replayed,
    summarized,
)
from stepfleet.orchestrator.records.run.trace import AgentTrace, added_messages, trace_of
from stepfleet.orchestrator.records.run.trace_steps import AgentStep
from stepfleet.orchestrator.records.text.validation import explain_invalid

__all__ = ["AgentRunResult", "LostAttempt", "LostKind", "RunStatus", "end_state", "run_status"]

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
