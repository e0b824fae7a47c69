"""The options that all benchmarks share, and their report: tables, a JSON file, a plot."""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any

import machine
from plots import Plot, draw
from repeats import Spread
from rich import box
from rich.console import Console
from rich.table import Table

from stepfleet.orchestrator.cli.watchdog import raise_open_files_limit

WIDTH = 100
progress = Console(stderr=True, highlight=False)


@dataclass(frozen=True)
class Column:
    """A column of a table: its heading, the measured field that it shows, and its digits.

    With `spread`, what was measured several times shows how far it lies apart.
    """

    heading: str
    field: str
    digits: int | None = None
    spread: bool = False


@dataclass
class Report:
    """What a benchmark has found. `rows` holds every single measurement, none left out."""

    benchmark: str
    arguments: dict[str, Any]
    machine: dict[str, object] = field(default_factory=machine.facts)
    rows: list[dict[str, Any]] = field(default_factory=list)
    ratios: dict[str, Any] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)

    def add(self, row: Any) -> None:
        """Add a measurement (a dataclass instance, or a mapping), and print it on stderr."""
        known = asdict(row) if is_dataclass(row) and not isinstance(row, type) else dict(row)
        self.rows.append(known)
        shown = {name: _short(value) for name, value in known.items()}
        progress.print("  ".join(f"{name}={value}" for name, value in shown.items()))

    def write(self, path: str | None) -> None:
        """Write everything as JSON, if a path is given."""
        if path:
            Path(path).write_text(
                json.dumps(asdict(self), indent=1, default=str) + "\n", encoding="utf-8"
            )


def parser(text: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of all benchmarks."""
    made = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--repeat", type=int, default=1, help="measure everything N times")
    made.add_argument("--json", metavar="FILE", help="write every measurement here")
    made.add_argument("--plot", metavar="FILE", help="draw into this .svg or .png (matplotlib)")
    return made


def begin(name: str, args: argparse.Namespace) -> Report:
    """Return a new report, after printing what is measured where."""
    raise_open_files_limit()
    report = Report(name, vars(args))
    progress.print(machine.summary(report.machine))
    return report


def finish(report: Report, args: argparse.Namespace, plots: Callable[[], list[Plot]]) -> None:
    """Print the ratios, and write the files."""
    for name, value in report.ratios.items():
        Console(width=WIDTH, highlight=False).print(f"{name}: {value.shown(3)}")
    report.write(args.json)
    if args.plot:
        draw(plots(), Path(args.plot))


def grouped(
    rows: Sequence[dict[str, Any]], by: Sequence[str]
) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """Return the rows that are repetitions of each other together, in their order."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in by), []).append(row)
    return groups


def values(rows: Sequence[dict[str, Any]], name: str) -> list[float]:
    """Return a field's values where it was measured."""
    return [row[name] for row in rows if row.get(name) is not None]


def show(
    title: str,
    rows: Sequence[dict[str, Any]],
    by: Sequence[str],
    columns: Sequence[Column],
    *,
    markdown: bool = False,
) -> None:
    """Print a table with a row for each group of repetitions: medians, and their spread."""
    if not rows:
        return
    console = Console(width=WIDTH, highlight=False)
    console.print(f"\n{title}")
    table = Table(box=box.MARKDOWN if markdown else box.HEAVY_HEAD)
    for column in columns:
        table.add_column(column.heading, justify="left" if column.digits is None else "right")
    for group in grouped(rows, by).values():
        table.add_row(*(_cell(group, column) for column in columns))
    console.print(table)


def _cell(group: Sequence[dict[str, Any]], column: Column) -> str:
    if column.digits is None:
        return str(group[0][column.field])
    known = values(group, column.field)
    if not known:
        return "-"
    spread = Spread.of(known)
    return spread.shown(column.digits) if column.spread else f"{spread.median:.{column.digits}f}"


def _short(value: object) -> object:
    return round(value, 3) if isinstance(value, float) else value
