"""Snapshots, checkpoints, restored and forked runs, comparisons."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stepfleet.orchestrator.cli.setup.with_fleet import with_fleet
from stepfleet.orchestrator.cli.terminal.format import count, seconds, shown, usd
from stepfleet.orchestrator.cli.terminal.output import notice, print_json, print_outcome
from stepfleet.orchestrator.cli.views.control import overrides_of
from stepfleet.orchestrator.client.checkpoints import CheckpointFolder, save_checkpoint
from stepfleet.orchestrator.client.comparison import RunComparison, RunFigures
from stepfleet.orchestrator.client.fleet import AsyncFleet
from stepfleet.orchestrator.protocol.serialization import SlimSerializationConfig

_CELL = 60


def print_snapshot(run_id: str, preset: str, data: Path, *, redact: bool) -> None:
    """Print a run's snapshot as JSON."""
    presets = {
        "minimal": SlimSerializationConfig.minimal,
        "standard": SlimSerializationConfig.standard,
        "full": SlimSerializationConfig.full,
    }
    config = presets[preset]().model_copy(update={"redact_tool_args": redact})
    print_json(with_fleet(data, lambda fleet: fleet.history.snapshot(run_id, config)))


def write_checkpoint(run_id: str, out: Path, data: Path, *, at: int | None) -> None:
    """Write one checkpoint to the file `out`."""
    kept = with_fleet(data, lambda fleet: fleet.history.checkpoint(run_id, at=at))
    notice(f"{save_checkpoint(kept, out)}: run {run_id}, {len(kept.steps)} steps")


def write_checkpoints(
    run_id: str, out: Path, data: Path, *, every: int, keep: int, follow: bool
) -> None:
    """Write a checkpoint per so many steps to the folder `out`, and keep the newest ones."""
    folder = CheckpointFolder(out, keep=keep)

    async def write(fleet: AsyncFleet) -> None:
        async for kept in fleet.history.checkpoints(run_id, every=every, follow=follow):
            notice(f"{folder.save(kept)}: {len(kept.steps)} steps")

    with_fleet(data, write, waits=follow)


def create_run(
    create: Callable[[AsyncFleet, Mapping[str, Any]], Awaitable[str]],
    changes: Sequence[str],
    data: Path,
    *,
    json: bool,
) -> None:
    """Create a run with the overrides in `changes`, and print its id."""
    overrides = overrides_of(changes, "--set")
    run_id = with_fleet(data, lambda fleet: create(fleet, overrides), warn=True)
    print_outcome({"run_id": run_id}, run_id, json=json)


def comparison_picture(found: RunComparison) -> RenderableType:
    """Return two runs side by side, where they part, and their outputs' differences. Pure."""
    table = Table("", "first", "second", show_edge=False)
    one, other = _cells(found.first), _cells(found.second)
    for name, value in one.items():
        table.add_row(name, value, other[name])
    for name, (left, right) in found.settings.items():
        table.add_row(name, shown(left, _CELL), shown(right, _CELL))
    parts: list[RenderableType] = [table, Text(_parting(found))]
    if found.same_output:
        parts.append(Text("The outputs are the same."))
    parts += [Text(shown(line), style=_STYLES.get(line[:1], "")) for line in found.output_diff]
    return Group(*parts)


_STYLES = {"+": "green", "-": "red"}


def _cells(run: RunFigures) -> dict[str, str]:
    ended = f" ({run.stop_reason.value})" if run.stop_reason else ""
    origin = run.origin
    return {
        "run": run.run_id,
        "comes from": f"{origin.kind} of {origin.run_id} at {origin.at}" if origin else "",
        "state": run.lifecycle.value + ended,
        "steps": count(run.steps),
        "tool calls": count(run.tool_calls),
        "tokens": count(run.tokens),
        "cost": usd(run.cost_usd),
        "time in steps": seconds(run.seconds),
    }


def _parting(found: RunComparison) -> str:
    if found.first_differing_step is None:
        return "All steps are alike."
    if found.differs_in == ("missing",):
        return f"They part at step {found.first_differing_step}: one of them has no such step."
    what = ", ".join(found.differs_in).replace("_", " ")
    return f"They part at step {found.first_differing_step}: {what}."
