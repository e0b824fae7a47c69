"""Tables, JSON and a drawing of what was measured; ratios to Stepfleet of the same setting."""

import json
import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from peers_catalog import STEPFLEET
from peers_measure import Figures
from rich.console import Console
from rich.table import Table

COLUMNS = ("wall s", "steps/s", "x", "CPU s", "CPU ms/step", "server", "x", "peak MB")


@dataclass(frozen=True)
class Row:
    """A peer's medians in one setting, and how they compare with Stepfleet's next to it.

    `rate_ratio` is its steps/s over Stepfleet's, `cpu_ratio` its CPU per step over Stepfleet's.
    """

    peer: str
    latency: float
    concurrency: int
    runs: int
    steps: int
    times: int
    wall: float | None
    wall_spread: float | None
    rate: float | None
    peer_cpu_ms: float | None
    store_cpu_ms: float | None
    cpu_seconds: float | None
    memory: int | None
    rate_ratio: float | None
    cpu_ratio: float | None
    steps_done: int
    problem: str


def rows(measured: list[Figures]) -> list[Row]:
    """Return one row per peer and setting, in the order in which they came."""
    groups: dict[tuple[str, float, int, int, int], list[Figures]] = {}
    for one in measured:
        key = (one.peer, one.latency, one.concurrency, one.runs, one.steps)
        groups.setdefault(key, []).append(one)
    ordered = sorted(groups.values(), key=lambda group: (-group[0].latency, group[0].concurrency))
    return [_row(group, _beside(group[0], measured)) for group in ordered]


def _row(group: list[Figures], ours: list[Figures]) -> Row:
    first = group[0]
    rate, cpu = _median(group, lambda f: f.rate), _median(group, lambda f: f.cpu_ms)
    walls = [one.wall for one in group if one.wall is not None]
    return Row(
        peer=first.peer,
        latency=first.latency,
        concurrency=first.concurrency,
        runs=first.runs,
        steps=first.steps,
        times=len(group),
        wall=statistics.median(walls) if walls else None,
        wall_spread=max(walls) - min(walls) if walls else None,
        rate=rate,
        peer_cpu_ms=_median(group, lambda f: f.peer_cpu_ms),
        store_cpu_ms=_median(group, lambda f: f.store_cpu_ms),
        cpu_seconds=_median(group, lambda f: f.cpu_seconds or None),
        memory=max(one.memory for one in group) or None,
        rate_ratio=_ratio(rate, _median(ours, lambda f: f.rate)),
        cpu_ratio=_ratio(cpu, _median(ours, lambda f: f.cpu_ms)),
        steps_done=min(one.steps_done for one in group),
        problem=next((one.problem for one in group if one.problem), ""),
    )


def _beside(one: Figures, measured: list[Figures]) -> list[Figures]:
    same = (one.latency, one.concurrency, one.runs, one.steps)
    return [
        each
        for each in measured
        if each.peer == STEPFLEET.name
        and (each.latency, each.concurrency, each.runs, each.steps) == same
    ]


def _median(group: Iterable[Figures], of: Callable[[Figures], float | None]) -> float | None:
    values = [value for value in map(of, group) if value is not None]
    return statistics.median(values) if values else None


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def show(found: list[Row], console: Console) -> None:
    """Print a table per setting, and below it what did not finish."""
    for setting in dict.fromkeys((row.latency, row.concurrency) for row in found):
        part = [row for row in found if (row.latency, row.concurrency) == setting]
        first = part[0]
        table = Table(
            title=f"{first.runs} runs x {first.steps} steps, {first.concurrency} at a time, "
            f"latency {first.latency:g} s"
        )
        table.add_column("peer", no_wrap=True)
        for name in COLUMNS:
            table.add_column(name, justify="right")
        for row in part:
            table.add_row(*_cells(row))
        console.print(table)
        for row in part:
            if row.problem:
                console.print(f"* {row.peer}: {row.problem}", markup=False, soft_wrap=True)


def _cells(row: Row) -> list[str]:
    total = None if row.peer_cpu_ms is None else row.peer_cpu_ms + (row.store_cpu_ms or 0)
    return [
        f"{row.peer}{' *' if row.problem else ''}",
        _text(row.wall, "{:.1f}"),
        _text(row.rate, "{:.0f}"),
        _text(row.rate_ratio, "{:.2f}"),
        _text(row.cpu_seconds, "{:.1f}"),
        _text(total, "{:.2f}"),
        _text(row.store_cpu_ms, "{:.2f}"),
        _text(row.cpu_ratio, "{:.1f}"),
        _text(row.memory, "{:.0f}", 1e6),
    ]


def _text(value: float | None, form: str, divided: float = 1.0) -> str:
    return "-" if value is None else form.format(value / divided)


def write_json(path: str, machine: dict[str, Any], measured: list[Figures]) -> None:
    """Write the machine, the versions, every measurement and the rows to a file."""
    report = {
        **machine,
        "measured": [{**asdict(one), "rate": one.rate, "cpu_ms": one.cpu_ms} for one in measured],
        "rows": [asdict(row) for row in rows(measured)],
    }
    Path(path).write_text(json.dumps(report, indent=1), encoding="utf-8")


def draw(path: str, found: list[Row]) -> None:
    """Draw steps/s and CPU per step of each peer, a column per setting.

    Raises `ImportError` without matplotlib.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 - only for a drawing

    settings = list(dict.fromkeys((row.latency, row.concurrency) for row in found))
    peers = list(dict.fromkeys(row.peer for row in found))[::-1]
    figure = Figure(figsize=(6 * len(settings), 1.5 + 0.6 * len(peers)), layout="constrained")
    axes = figure.subplots(2, len(settings), squeeze=False, sharey=True)
    for column, setting in enumerate(settings):
        part = {row.peer: row for row in found if (row.latency, row.concurrency) == setting}
        title = f"{setting[1]} at a time, latency {setting[0]:g} s"
        rates = [(part[peer].rate or 0) if peer in part else 0 for peer in peers]
        cpu = [_cpu(part.get(peer)) for peer in peers]
        for place, values, name in (
            (axes[0][column], rates, "steps/s"),
            (axes[1][column], cpu, "CPU ms per step"),
        ):
            place.barh(peers, values)
            place.set_title(title)
            place.set_xlabel(name)
            labels = [_label(*each) for each in zip(values, map(part.get, peers), strict=True)]
            place.bar_label(place.containers[0], labels=labels, padding=3)
            place.margins(x=0.4)
    figure.savefig(path)


def _cpu(row: Row | None) -> float:
    if row is None or row.peer_cpu_ms is None:
        return 0.0
    return row.peer_cpu_ms + (row.store_cpu_ms or 0.0)


def _label(value: float, row: Row | None) -> str:
    unfinished = row is not None and bool(row.problem)
    return f"{value:.3g}{' (did not finish)' if unfinished else ''}" if value else "-"
