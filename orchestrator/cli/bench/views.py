"""A benchmark's figures as tables for people, and as one object for programs. Pure."""

import os
import platform
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stepfleet.orchestrator.cli.bench.figures import Figures, assumptions
from stepfleet.orchestrator.cli.terminal.format import count

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
        ("runs completed", f"{count(counts.completed)} of {count(counts.runs)}"),
        ("steps", count(counts.steps)),
        ("attempts not committed", count(counts.lost_attempts)),
        ("workers x slots", f"{figures.workers} x {count(figures.slots)}"),
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
            count(one.concurrent),
            f"{one.steps_per_second:,.0f}",
            count(one.workers),
            one.bound,
            f"{one.redis_cores:.2f}",
            f"{one.redis_bytes / _MB:,.0f}",
        )
    return table
