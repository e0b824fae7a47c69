"""The figures of a benchmark, and estimates for larger fleets. Pure."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

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
