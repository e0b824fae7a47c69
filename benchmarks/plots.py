"""Draws series into a file, by matplotlib where it is installed. Knows no benchmark."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

WIDTH_INCHES, HEIGHT_INCHES = 6.0, 4.0


@dataclass(frozen=True)
class Line:
    """A named line: x and y of its points, and the extremes of y."""

    label: str
    points: Sequence[tuple[float, float, float, float]]


@dataclass(frozen=True)
class Plot:
    """A diagram with its lines; `logarithmic` is about the x axis."""

    title: str
    x: str
    y: str
    lines: Sequence[Line] = field(default_factory=tuple)
    logarithmic: bool = False


def draw(plots: Sequence[Plot], path: Path) -> None:
    """Draw the plots side by side. Ends the program, with the fix, without matplotlib."""
    try:
        import matplotlib as mpl  # noqa: PLC0415 - only where something is drawn
        from matplotlib.figure import Figure  # noqa: PLC0415 - the same
    except ImportError:
        sys.exit("--plot needs matplotlib: uv sync --group bench, or pip install matplotlib")
    mpl.rcParams["svg.hashsalt"] = "stepfleet"
    figure = Figure(figsize=(WIDTH_INCHES * len(plots), HEIGHT_INCHES), layout="constrained")
    for place, plot in enumerate(plots):
        axes = figure.add_subplot(1, len(plots), place + 1)
        for line in plot.lines:
            xs = [point[0] for point in line.points]
            ys = [point[1] for point in line.points]
            below = [point[1] - point[2] for point in line.points]
            above = [point[3] - point[1] for point in line.points]
            axes.errorbar(xs, ys, yerr=[below, above], marker="o", capsize=3, label=line.label)
        axes.set(title=plot.title, xlabel=plot.x, ylabel=plot.y)
        axes.set_ylim(bottom=0)
        if plot.logarithmic:
            axes.set_xscale("symlog", linthresh=1)
        axes.grid(visible=True, alpha=0.3)
        if plot.lines:
            axes.legend()
    figure.savefig(path)
