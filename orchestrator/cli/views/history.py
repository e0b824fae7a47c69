"""What the command line does with a run's past: snapshots, checkpoints, forks, comparisons."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stepfleet.orchestrator.cli.setup.with_fleet import with_fleet
from stepfleet.orchestrator.cli.terminal.format import count, seconds, shown, usd
from stepfleet.orchestrator.cli.terminal.output import notice, print_json, screen
from stepfleet.orchestrator.cli.views.control import overrides_of
from stepfleet.orchestrator.client.checkpoints.files import (
    CheckpointFolder,
    load_checkpoint,
    save_checkpoint,
)
from stepfleet.orchestrator.client.fleet import AsyncFleet
from stepfleet.orchestrator.client.history.comparison import RunComparison, RunFigures
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.protocol.serialization.slim_config import SlimSerializationConfig

_OPTION = "--set"
_CELL = 60


@dataclass(frozen=True, slots=True)
class KeepAll:
    """Which checkpoints of a run are wanted, where it is not the one of now."""

    every: int | None
    keep: int
    follow: bool


@dataclass(frozen=True, slots=True)
class ForkWish:
    """A fork as it was typed."""

    run_id: str
    at: int | None
    changes: Sequence[str]
    message: str | None
    tools: str | None


def print_snapshot(run_id: str, preset: str, data: Path, *, redact: bool) -> None:
    """Print a run's snapshot as JSON."""
    presets = {
        "minimal": SlimSerializationConfig.minimal,
        "standard": SlimSerializationConfig.standard,
        "full": SlimSerializationConfig.full,
    }
    config = presets[preset]().model_copy(update={"redact_tool_args": redact})

    async def take(fleet: AsyncFleet) -> None:
        print_json(await fleet.history.snapshot(run_id, config))

    with_fleet(data, take)


def write_checkpoint(
    run_id: str, out: Path, data: Path, *, at: int | None, all_of: KeepAll
) -> None:
    """Write one checkpoint to the file `out`, or one per so many steps to the folder `out`."""
    every = all_of.every
    if every is None and all_of.follow:
        raise ConfigurationError("--follow needs --every: write --every 1 for each step")
    if every is not None and at is not None:
        raise ConfigurationError("--at and --every are two ways to choose; give one of them")

    async def write(fleet: AsyncFleet) -> None:
        if every is None:
            kept = await fleet.history.checkpoint(run_id, at=at)
            notice(f"{save_checkpoint(kept, out)}: run {run_id}, {len(kept.steps)} steps")
            return
        folder = CheckpointFolder(out, keep=all_of.keep)
        async for kept in fleet.history.checkpoints(run_id, every=every, follow=all_of.follow):
            notice(f"{folder.save(kept)}: {len(kept.steps)} steps")

    with_fleet(data, write, waits=all_of.follow)


def restore_run(
    file: Path, agent: str | None, changes: Sequence[str], data: Path, *, as_new: bool, json: bool
) -> None:
    """Create the run of a checkpoint and print its id."""
    overrides = overrides_of(changes, _OPTION)
    checkpoint = load_checkpoint(file)

    async def restore(fleet: AsyncFleet) -> None:
        wanted = str(uuid4()) if as_new else None
        _say_id(
            await fleet.history.restore(checkpoint, agent, run_id=wanted, **overrides), json=json
        )

    with_fleet(data, restore, warn=True)


def fork_run(wish: ForkWish, data: Path, *, json: bool) -> None:
    """Start a fork and print its id."""
    overrides = overrides_of(wish.changes, _OPTION)
    tools = None if wish.tools is None else [one for one in wish.tools.split(",") if one]

    async def fork(fleet: AsyncFleet) -> None:
        made = await fleet.history.fork(
            wish.run_id, at=wish.at, message=wish.message, tools=tools, **overrides
        )
        _say_id(made, json=json)

    with_fleet(data, fork, warn=True)


def compare_runs(first: str, second: str, data: Path, *, json: bool) -> None:
    """Print how two runs differ."""

    async def compare(fleet: AsyncFleet) -> None:
        found = await fleet.history.compare(first, second)
        if json:
            print_json(found.to_dict())
        else:
            screen().print(comparison_picture(found))

    with_fleet(data, compare)


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


def _say_id(run_id: str, *, json: bool) -> None:
    if json:
        print_json({"run_id": run_id})
    else:
        sys.stdout.write(run_id + "\n")
