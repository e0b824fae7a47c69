"""A finished (or running) run as its caller sees it: its facts, and the ways to look at them."""

from typing import TypeVar

from stepfleet.orchestrator.records.messages import Message
from stepfleet.orchestrator.records.run.endings import RunStatus, end_state, run_status
from stepfleet.orchestrator.records.run.facts import LostAttempt, LostKind, RunFacts
from stepfleet.orchestrator.records.run.raising import check_ended_well
from stepfleet.orchestrator.records.run.report import (
    DebugSummary,
    debugged,
    explained,
    replayed,
    summarized,
)
from stepfleet.orchestrator.records.run.structured import read_structured
from stepfleet.orchestrator.records.run.trace import AgentTrace, added_messages, trace_of
from stepfleet.orchestrator.records.run.trace_steps import AgentStep

__all__ = ["AgentRunResult", "LostAttempt", "LostKind", "RunStatus", "end_state", "run_status"]

T = TypeVar("T")


class AgentRunResult(RunFacts):
    """Everything about one run; fetchable by `run_id` from anywhere, any time."""

    def summary(self) -> str:
        """Return one line: status, agent, steps, tool calls, tokens, duration in seconds."""
        return summarized(self)

    def debug(self) -> DebugSummary:
        """Return what the run came to, in short: why it stopped, its errors, what it used."""
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
        """Return the messages that the steps added, rebuilt: the conversation behind its inputs."""
        return added_messages(self.steps)

    def structured_as(self, expected: type[T]) -> T:
        """Return the structured data as an `expected`, any type that pydantic can read.

        Raises `StructuredDataError` that names the place when there is no data, no schema, or
        data of another schema.
        """
        return read_structured(self, expected)

    def raise_for_status(self) -> "AgentRunResult":
        """Return the result if the run completed.

        Raises `MaxStepsExceeded` when it stopped at a limit, `RunFailed` when it failed or was
        cancelled, `RunActive` when it has not ended; each carries this result.
        """
        check_ended_well(self)
        return self
