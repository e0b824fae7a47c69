"""The tool calls of a run, selected by name or outcome. Values, derived from its log."""

from collections.abc import Iterable

from stepfleet.orchestrator.records.base import Record
from stepfleet.orchestrator.records.steps import StepResult
from stepfleet.orchestrator.records.tools import ToolCallRecord


class ToolTrace(Record):
    """One tool call: its step (from 1), its index in the response (from 0), and its record."""

    step: int
    index: int
    call: ToolCallRecord


class ToolTraces(Record):
    """The tool calls of committed steps, in their order."""

    traces: tuple[ToolTrace, ...] = ()

    def all(self) -> tuple[ToolTrace, ...]:
        """Return all of them."""
        return self.traces

    def last(self) -> ToolTrace | None:
        """Return the newest one, if there is one."""
        return self.traces[-1] if self.traces else None

    def by_name(self, name: str) -> tuple[ToolTrace, ...]:
        """Return the calls of the tool `name`."""
        return tuple(trace for trace in self.traces if trace.call.tool_name == name)

    def failed(self) -> tuple[ToolTrace, ...]:
        """Return the calls that ended in an error."""
        return tuple(trace for trace in self.traces if trace.call.is_error)


def tool_traces_of(steps: Iterable[StepResult], cleared: int = 0) -> ToolTraces:
    """Return the tool calls of `steps` without the first `cleared` ones."""
    found = [
        ToolTrace(step=step.step, index=index, call=call)
        for step in steps
        for index, call in enumerate(step.tool_calls)
    ]
    return ToolTraces(traces=tuple(found[cleared:]))
