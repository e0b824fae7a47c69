"""The load: runs whose inputs hold the duration of each model call, and which of them use a tool.

The times are drawn here and not by the provider, so that the ideal time of the load is known.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import orjson

from stepfleet.orchestrator.cli.bench.latencies import Latencies

WARM_RUNS = 20


@dataclass(frozen=True, slots=True)
class Workload:
    """A load: `runs` of `steps` model calls each.

    `tools` is the share of the calls before the last that call a tool, which takes
    `tool_seconds`; the last call is the answer.
    """

    runs: int
    steps: int
    latency: Latencies
    tools: float = 1.0
    tool_seconds: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One run: the seconds of each model call, and which of them calls the tool."""

    name: str
    seconds: tuple[float, ...]
    tools: tuple[bool, ...]
    tool_seconds: float

    @property
    def ideal(self) -> float:
        """The seconds that model and tools take, one after the other."""
        return sum(self.seconds) + sum(self.tools) * self.tool_seconds

    def line(self) -> dict[str, Any]:
        """Return the batch's line, which the provider's rules read."""
        plan = {
            "run": self.name,
            "seconds": [round(one, 6) for one in self.seconds],
            "tools": self.tools,
            "tool_seconds": self.tool_seconds,
        }
        return {"id": self.name, "input": orjson.dumps(plan).decode()}


def planned(load: Workload, name: str = "run") -> list[PlannedRun]:
    """Return the runs; the same load always results in the same plan."""
    random = Random(load.seed)  # noqa: S311 - no secret
    return [_plan(load, f"{name}-{number}", random) for number in range(load.runs)]


def warming(workers: int) -> list[PlannedRun]:
    """Return runs before the measurement, so that workers are connected and loaded."""
    return planned(Workload(workers * WARM_RUNS, 2, Latencies()), "warm")


def ideal_seconds(runs: Sequence[PlannedRun], at_once: int) -> float:
    """Return the shortest possible time of the load with `at_once` concurrent runs.

    No less than the longest run, and no less than all of them shared out evenly.
    """
    times = [one.ideal for one in runs]
    return max(*times, sum(times) / at_once)


def mean_step_seconds(runs: Sequence[PlannedRun]) -> float:
    """Return the mean seconds of a model call and its tool."""
    return sum(one.ideal for one in runs) / sum(len(one.seconds) for one in runs)


def _plan(load: Workload, name: str, random: Random) -> PlannedRun:
    seconds = tuple(load.latency.draw(random) for _ in range(load.steps))
    tools = (*(random.random() < load.tools for _ in range(load.steps - 1)), False)
    return PlannedRun(name, seconds, tools, load.tool_seconds)
