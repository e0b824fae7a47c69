"""The figures of `bench.py`, estimates for larger fleets, and both as tables and as data. Pure."""

import math
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

BUSY = 0.7
"""The share of a core that a worker may use in the estimate; the rest is for bursts."""

_MS = 1000


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles of one quantity; 0 without values."""

    p50: float = 0.0
    p95: float = 0.0
    p99: float = 0.0

    @classmethod
    def of(cls, values: Iterable[float]) -> "Percentiles":
        """Return them for some values."""
        known = sorted(values)
        return cls(*(percentile(known, share) for share in (0.5, 0.95, 0.99)))


def percentile(values: Iterable[float], share: float) -> float:
    """Return the smallest value that `share` (0 to 1) of all values do not exceed; 0 for none."""
    known = sorted(values)
    return known[max(0, math.ceil(share * len(known)) - 1)] if known else 0.0


@dataclass(frozen=True, slots=True)
class Ended:
    """A run that completed without a lost attempt: its steps' seconds, and its own.

    `seconds` is from its first step's start to its last step's end, `planned` is the planned time
    of model and tools.
    """

    steps: Sequence[float]
    seconds: float
    planned: float

    @property
    def added(self) -> float:
        """The seconds per step beyond the plan."""
        return (self.seconds - self.planned) / len(self.steps)


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of runs and completed runs, committed steps, and attempts that were lost."""

    runs: int
    completed: int
    steps: int
    lost_attempts: int


@dataclass(frozen=True, slots=True)
class Figures:
    """A measurement. Times in seconds, CPU in milliseconds per step, memory in bytes.

    `step_seconds` is model call and tools; `added_ms` is the time of a step beyond the planned time
    of model and tools, with the wait for the next step. `model_share` is the share of a core that
    the simulated provider used: near 1, the provider was the bottleneck.
    """

    counts: Counts
    workers: int
    slots: int
    wall_seconds: float
    ideal_seconds: float
    mean_step_seconds: float
    step_seconds: Percentiles
    added_ms: Percentiles
    worker_ms_per_step: float
    redis_ms_per_step: float
    model_ms_per_step: float
    bytes_per_worker: int
    redis_bytes_per_run: float
    model_share: float
    estimates: Sequence["Estimate"] = field(default_factory=tuple)

    @property
    def steps_per_second(self) -> float:
        """Steps per second of the whole fleet."""
        return self.counts.steps / self.wall_seconds

    @property
    def wall_over_ideal(self) -> float | None:
        """Wall time over the shortest possible time of the load; None where that is 0."""
        return self.wall_seconds / self.ideal_seconds if self.ideal_seconds else None


@dataclass(frozen=True, slots=True)
class Estimate:
    """The workers that so many concurrent runs need; `bound` is the limit: CPU or slots.

    `redis_cores` is the CPU that Redis needs; its main thread has one core.
    """

    concurrent: int
    steps_per_second: float
    workers: int
    bound: str
    redis_cores: float
    redis_bytes: float


def estimate(figures: Figures, concurrent: int) -> Estimate:
    """Return the estimate for `concurrent` runs at the measured cost and time per step."""
    cycle = figures.mean_step_seconds + max(0.0, figures.added_ms.p50) / _MS
    rate = concurrent / cycle if cycle else figures.steps_per_second
    by_cpu = rate * figures.worker_ms_per_step / _MS / BUSY
    by_slots = concurrent / figures.slots
    return Estimate(
        concurrent=concurrent,
        steps_per_second=rate,
        workers=max(1, math.ceil(max(by_cpu, by_slots))),
        bound="CPU" if by_cpu >= by_slots else "slots",
        redis_cores=rate * figures.redis_ms_per_step / _MS,
        redis_bytes=concurrent * figures.redis_bytes_per_run,
    )


def assumptions(figures: Figures) -> list[str]:
    """Return the assumptions of the estimates, as sentences."""
    step, worker = figures.mean_step_seconds, figures.worker_ms_per_step
    rate = figures.steps_per_second / figures.workers
    return [
        f"every worker has {figures.slots:,} slots and a core of this kind, used up to {BUSY:.0%}",
        f"a step takes {step:.3g} s in model and tool and {worker:.2f} ms of CPU, as measured here",
        f"a worker is as busy as here ({rate:,.0f} steps/s): less busy, it costs more per step",
        "messages, histories and results are as small as here, and tools use no CPU",
        f"one Redis for store and broker, with one core; above {BUSY} cores it becomes the limit",
        "the provider answers as fast to all of them: rate limits are not simulated",
    ]


PACKAGES = ("stepfleet", "celery", "kombu", "redis")
CROWDED = 0.85
"""Above this share of a core, the provider itself limits the rate."""

_MB = 1e6


def machine() -> dict[str, Any]:
    """Return the machine's facts: CPUs, Python, versions."""
    return {
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": {name: version(name) for name in PACKAGES},
    }


def as_data(figures: Figures) -> dict[str, Any]:
    """Return everything as data for JSON."""
    return {
        **asdict(figures),
        "steps_per_second": figures.steps_per_second,
        "wall_over_ideal": figures.wall_over_ideal,
        "assumptions": assumptions(figures),
        "machine": machine(),
    }


def as_tables(figures: Figures) -> RenderableType:
    """Return the measured figures, then the estimates with their assumptions."""
    facts = machine()
    packages = " ".join(f"{name} {number}" for name, number in facts["packages"].items())
    parts: list[RenderableType] = [
        Text(f"{facts['cpus']} CPUs, Python {facts['python']}, {packages}"),
        _measured(figures),
    ]
    if figures.model_share > CROWDED:
        parts.append(
            Text(
                f"The simulated provider used {figures.model_share:.0%} of a core: it, and not "
                "the fleet, set the pace. Fix: a longer --latency."
            )
        )
    if figures.estimates:
        parts += [_estimates(figures), Text("These estimates assume:")]
        parts += [Text(f"- {one}") for one in assumptions(figures)]
    return Group(*parts)


def _measured(figures: Figures) -> Table:
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    counts, step, added = figures.counts, figures.step_seconds, figures.added_ms
    over = figures.wall_over_ideal
    for label, value in (
        ("runs completed", f"{_count(counts.completed)} of {_count(counts.runs)}"),
        ("steps", _count(counts.steps)),
        ("attempts not committed", _count(counts.lost_attempts)),
        ("workers x slots", f"{figures.workers} x {_count(figures.slots)}"),
        ("wall time", f"{figures.wall_seconds:.2f} s"),
        ("wall / ideal", f"{over:.2f}" if over else "-"),
        ("steps per second", f"{figures.steps_per_second:.1f}"),
        ("step p50, p95, p99", f"{step.p50:.3f}, {step.p95:.3f}, {step.p99:.3f} s"),
        ("added per step", f"{added.p50:.1f}, {added.p95:.1f}, {added.p99:.1f} ms"),
        ("worker CPU per step", f"{figures.worker_ms_per_step:.2f} ms"),
        ("Redis CPU per step", f"{figures.redis_ms_per_step:.3f} ms"),
        ("memory of a worker", f"{figures.bytes_per_worker / _MB:.0f} MB"),
        ("Redis memory per run", f"{figures.redis_bytes_per_run / 1000:.1f} kB"),
    ):
        table.add_row(label, value)
    return table


def _estimates(figures: Figures) -> Table:
    table = Table()
    for heading in ("runs at once", "steps/s", "workers", "set by", "Redis cores", "Redis MB"):
        table.add_column(heading, justify="right")
    for one in figures.estimates:
        table.add_row(
            _count(one.concurrent),
            f"{one.steps_per_second:,.0f}",
            _count(one.workers),
            one.bound,
            f"{one.redis_cores:.2f}",
            f"{one.redis_bytes / _MB:,.0f}",
        )
    return table


def _count(value: int) -> str:
    return f"{value:,}"
