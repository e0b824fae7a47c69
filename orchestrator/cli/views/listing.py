"""Runs as `stepfleet ls` lists them, as a table, and those below a run, as a tree."""

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from stepfleet.orchestrator.cli.terminal.format import count, shown, usd
from stepfleet.orchestrator.client.fleet import AsyncFleet
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
    table = Table(box=None, pad_edge=False)
    for name in ("run", "line", "agent", "status", "steps", "created (UTC)", "error"):
        table.add_column(name, justify="right" if name == "steps" else "left", overflow="fold")
    for run in page.runs:
        cells = (run.run_id, run.line_id or "", run.agent, _state(run), count(run.steps))
        created = f"{run.created:%Y-%m-%d %H:%M:%S}"
        error = (run.error or "").partition("\n")[0]
        error = error if len(error) <= _ERROR else f"{error[: _ERROR - 1]}…"
        table.add_row(*(Text(shown(cell)) for cell in (*cells, created, error)))
    if page.next:
        more = f"More: add --cursor {page.next}"
    else:
        more = "" if page.runs else "No run matches."
    return Group(*([table] if page.runs else []), *([Text(more)] if more else []))


def below(tree: RunTree) -> RenderableType | None:
    """Return the runs below a run, a line each; None where there is none."""
    if not tree.below and not tree.left_out:
        return None
    return _branches(tree, Tree(Text("runs below", style="bold")))


def _branches(tree: RunTree, at: Tree) -> Tree:
    for one in tree.below:
        run = one.run
        steps = "1 step" if run.steps == 1 else f"{count(run.steps)} steps"
        spent = f"{steps}, {usd(run.cost_usd)}" if run.cost_usd else steps
        line = Text(f"{shown(run.agent, _ERROR)}: {_state(run)}, {spent}")
        _branches(one, at.add(line.append(f"  {run.run_id}", style="dim")))
    if tree.left_out:
        at.add(Text(f"and {count(tree.left_out)} more", style="dim"))
    return at


def _state(run: RunSummary) -> str:
    reason = run.stop_reason.value if run.stop_reason else ""
    status = run.status.value
    return f"{status} ({reason})" if reason not in ("", status) else status
