"""Runs as `stepfleet ls` lists them, as a table, and those below a run, as a tree."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from stepfleet.orchestrator.cli.terminal.format import WIDE, count, shown, shown_error, usd
from stepfleet.orchestrator.cli.views.approvals import call_text
from stepfleet.orchestrator.client.fleet import AsyncFleet
from stepfleet.orchestrator.records.calls.answers import Ask
from stepfleet.orchestrator.records.run.summary import RunPage, RunSummary, RunTree

MOST_PAGES = 40
"""Pages that are read in search of enough runs: what matches may be rare."""
_ERROR = 60


async def read(
    fleet: AsyncFleet, *, which: dict[str, Any], limit: int, cursor: str | None
) -> RunPage:
    """Return up to `limit` runs. Raises `ConfigurationError` that names a wrong condition."""
    runs: list[RunSummary] = []
    looked_at = 0
    for _ in range(MOST_PAGES):
        page = await fleet.runs.page(limit=limit - len(runs), cursor=cursor, **which)
        runs += page.runs
        looked_at += page.looked_at
        cursor = page.next
        if len(runs) >= limit or cursor is None:
            break
    return RunPage(runs=tuple(runs), next=cursor, looked_at=looked_at)


def picture(page: RunPage) -> RenderableType:
    """Return the runs as a table, with where to go on."""
    if page.next:
        more = f"More: add --cursor {page.next}"
    else:
        more = "" if page.runs else "No run matches."
    return Group(*([_Listed(page.runs)] if page.runs else []), *([Text(more)] if more else []))


@dataclass(frozen=True, slots=True)
class _Listed:
    """A row for each run; on a narrow terminal a line or two, so that ids are whole."""

    runs: Sequence[RunSummary]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from [_table(self.runs)] if options.max_width >= WIDE else map(_lines, self.runs)


def _table(runs: Sequence[RunSummary]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("run", no_wrap=True)
    for name in ("line", "agent", "status", "steps", "created (UTC)", "error"):
        table.add_column(name, justify="right" if name == "steps" else "left", overflow="fold")
    for run in runs:
        cells = (run.run_id, run.line_id or "", run.agent, _state(run), count(run.steps))
        created = f"{run.created:%Y-%m-%d %H:%M:%S}"
        table.add_row(*(Text(shown(cell)) for cell in (*cells, created, _error(run))))
    return table


def _lines(run: RunSummary) -> RenderableType:
    line = f" line {run.line_id}," if run.line_id else ""
    about = f"{run.agent},{line} {_state(run)}, {_steps(run)}, {run.created:%m-%d %H:%M} UTC"
    texts: list[RenderableType] = [
        Text(shown(run.run_id)),
        Padding(Text(shown(about)), (0, 0, 0, 2)),
    ]
    if error := _error(run):
        texts.append(Padding(Text(shown(error), style="red"), (0, 0, 0, 2)))
    return Group(*texts)


def _error(run: RunSummary) -> str:
    return shown_error((run.error or "").partition("\n")[0], _ERROR)


def below(tree: RunTree, asks: Sequence[Ask] = ()) -> RenderableType | None:
    """Return the runs below a run, each with its calls of `asks`; None where there is none."""
    if not tree.below and not tree.left_out:
        return None
    branches = _branches(tree, Tree(Text("runs below", style="bold")), asks)
    return Group(branches, Text("decide: stepfleet approvals")) if asks else branches


def _branches(tree: RunTree, at: Tree, asks: Sequence[Ask]) -> Tree:
    for one in tree.below:
        run = one.run
        is_guess = run.price_estimated or run.usage_estimated
        spent = (
            f"{_steps(run)}, {usd(run.cost_usd, guessed=is_guess)}" if run.cost_usd else _steps(run)
        )
        line = Text(f"{shown(run.agent, _ERROR)}: {_state(run)}, {spent}")
        branch = at.add(line.append(f"  {run.run_id}", style="dim"))
        for ask in asks:
            if ask.run_id == run.run_id:
                waits = Text("waits for a person: ", style="yellow").append(call_text(ask))
                branch.add(waits)
        _branches(one, branch, asks)
    if tree.left_out:
        at.add(Text(f"and {count(tree.left_out)} more", style="dim"))
    return at


def _steps(run: RunSummary) -> str:
    return "1 step" if run.steps == 1 else f"{count(run.steps)} steps"


def _state(run: RunSummary) -> str:
    reason = run.stop_reason.value if run.stop_reason else ""
    status = run.status.value
    return f"{status} ({reason})" if reason not in ("", status) else status
