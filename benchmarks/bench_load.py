"""The load of `bench.py`: runs whose inputs hold the duration of each model call. Pure.

The times are drawn here and not by the provider, so that the ideal time of the load is known:
constant, even, log-normal, with a tail.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Self

import orjson

from stepfleet.orchestrator import ConfigurationError

FORMS = (
    "0.5 (always), 0.2-1.5 (evenly), p50=1,p99=8 (log-normal); with ,tail=0.02:30 so large a "
    "share takes 30 s instead"
)
_Z99 = 2.3263478740408408
"""Standard deviations from the median to the 99th percentile."""


@dataclass(frozen=True, slots=True)
class Latencies:
    """Seconds between `low` and `high`, or log-normal about `low` with `sigma`.

    The share `tail` of all calls takes `tail_seconds` instead.
    """

    low: float = 0.0
    high: float | None = None
    sigma: float = 0.0
    tail: float = 0.0
    tail_seconds: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read one of the `FORMS`. Raises `ConfigurationError` that lists them."""
        try:
            return cls(**_read(text))
        except (ValueError, KeyError) as error:
            msg = f"--latency {text}: not a latency ({error}); write {FORMS}"
            raise ConfigurationError(msg) from None

    def draw(self, random: Random) -> float:
        """Return the seconds of one call."""
        if self.tail and random.random() < self.tail:
            return self.tail_seconds
        if self.sigma:
            return self.low * math.exp(random.gauss(0.0, self.sigma))
        return self.low if self.high is None else random.uniform(self.low, self.high)


def _read(text: str) -> dict[str, float]:
    found: dict[str, float] = {}
    named: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if equals:
            named[name.strip()] = value
        elif "-" in part:
            low, high = part.split("-")
            found |= {"low": _seconds(low), "high": _seconds(high)}
        else:
            found["low"] = _seconds(part)
    if unknown := set(named) - {"p50", "p99", "tail"}:
        raise ValueError(f"{min(unknown)!r} is unknown")
    if "tail" in named:
        share, _, takes = named["tail"].partition(":")
        found |= {"tail": _seconds(share), "tail_seconds": _seconds(takes)}
    if "p50" in named or "p99" in named:
        median, slow = _seconds(named["p50"]), _seconds(named["p99"])
        if not 0 < median <= slow:
            raise ValueError("p99 must not be below p50, nor p50 be 0")
        found |= {"low": median, "sigma": math.log(slow / median) / _Z99}
    if found.get("high", math.inf) < found["low"]:
        raise ValueError("the second number must not be below the first")
    if found.get("tail", 0.0) > 1:
        raise ValueError("the tail's share is above 1")
    return found


def _seconds(text: str) -> float:
    value = float(text)
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{text!r} is not a number from 0")
    return value


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
