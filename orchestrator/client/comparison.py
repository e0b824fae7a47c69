"""Two runs side by side: figures, what differs in their set-up, and from which step. Pure."""

import difflib
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

from pydantic import Field

from stepfleet.orchestrator.agents.config import AgentConfig
from stepfleet.orchestrator.records.base import Record
from stepfleet.orchestrator.records.outcome import StopReason
from stepfleet.orchestrator.records.run.facts import RunOrigin
from stepfleet.orchestrator.records.run.results import AgentRunResult
from stepfleet.orchestrator.records.state import Lifecycle
from stepfleet.orchestrator.records.steps import StepResult
from stepfleet.orchestrator.store.runs.reading import StoredRun


class RunFigures(Record):
    """The figures of one run; `seconds` in its steps, `end_to_end` from start to end."""

    run_id: str
    agent_name: str
    model: str
    lifecycle: Lifecycle
    stop_reason: StopReason | None = None
    steps: int = 0
    tool_calls: int = 0
    tokens: int = 0
    cost_usd: float = 0.0
    seconds: float = 0.0
    end_to_end: float | None = None
    output: str | None = None
    origin: RunOrigin | None = None


class RunComparison(Record):
    """How `second` differs from `first`.

    `first_differing_step` counts from 1 and is None where all steps are alike; `differs_in` names
    the differences there: `missing`, `type`, `thought`, `tool_calls`, `results`. `settings` are the
    fields of the configuration that differ, each with both values; `output_diff` is a unified
    diff of the outputs, empty where they are the same.
    """

    first: RunFigures
    second: RunFigures
    same_output: bool
    output_diff: tuple[str, ...] = ()
    first_differing_step: int | None = None
    differs_in: tuple[str, ...] = ()
    settings: dict[str, tuple[Any, Any]] = Field(default_factory=dict)

    @property
    def more(self) -> dict[str, float]:
        """The second run's figures minus the first's: steps, tool calls, tokens, cost, seconds."""
        names = ("steps", "tool_calls", "tokens", "cost_usd", "seconds")
        return {name: getattr(self.second, name) - getattr(self.first, name) for name in names}


def compared(first: StoredRun, second: StoredRun) -> RunComparison:
    """Return the comparison of two runs, as far as they have come."""
    one, other = first.result(), second.result()
    step, differs = _parting(one, other)
    return RunComparison(
        first=_figures(one, first.config),
        second=_figures(other, second.config),
        same_output=one.output == other.output,
        output_diff=tuple(_diff(one, other)),
        first_differing_step=step,
        differs_in=differs,
        settings=_settings(first.config, second.config),
    )


def _figures(result: AgentRunResult, config: AgentConfig) -> RunFigures:
    return RunFigures(
        run_id=result.run_id,
        agent_name=result.agent_name,
        model=config.model,
        lifecycle=result.lifecycle,
        stop_reason=result.stop_reason,
        steps=result.steps_used,
        tool_calls=result.tool_calls_total,
        tokens=result.usage.total_tokens,
        cost_usd=result.cost_usd,
        seconds=result.cumulative_execution_seconds,
        end_to_end=result.duration_seconds,
        output=result.output,
        origin=result.origin,
    )


def _parting(one: AgentRunResult, other: AgentRunResult) -> tuple[int | None, tuple[str, ...]]:
    for number, (left, right) in enumerate(zip_longest(one.steps, other.steps), 1):
        if left is None or right is None:
            return number, ("missing",)
        if differs := tuple(_differences(left, right)):
            return number, differs
    return None, ()


def _differences(left: StepResult, right: StepResult) -> Iterator[str]:
    """Yield what differs in what two steps did; ids, times and costs are no difference."""
    if left.type is not right.type:
        yield "type"
    if left.thought != right.thought:
        yield "thought"
    if _calls(left) != _calls(right):
        yield "tool_calls"
    elif _results(left) != _results(right):
        yield "results"


def _calls(step: StepResult) -> list[tuple[str, dict[str, Any]]]:
    return [(call.tool_name, call.arguments) for call in step.tool_calls]


def _results(step: StepResult) -> list[tuple[Any, str | None]]:
    return [(call.result, call.error.code if call.error else None) for call in step.tool_calls]


def _diff(one: AgentRunResult, other: AgentRunResult) -> Iterator[str]:
    return difflib.unified_diff(
        (one.output or "").splitlines(),
        (other.output or "").splitlines(),
        one.run_id,
        other.run_id,
        lineterm="",
    )


def _settings(one: AgentConfig, other: AgentConfig) -> dict[str, tuple[Any, Any]]:
    left, right = one.to_dict(), other.to_dict()
    names = [
        name for name in (*left, *(right.keys() - left.keys())) if left.get(name) != right.get(name)
    ]
    return {name: (left.get(name), right.get(name)) for name in names}
