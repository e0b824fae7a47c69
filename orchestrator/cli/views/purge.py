"""`stepfleet purge`: asks for confirmation, removes ended runs, prints their number."""

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stepfleet.orchestrator.cli.setup.with_fleet import with_fleet
from stepfleet.orchestrator.cli.terminal.format import count
from stepfleet.orchestrator.cli.terminal.output import print_json
from stepfleet.orchestrator.client.fleet import AsyncFleet
from stepfleet.orchestrator.errors import ConfigurationError

_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_TIME = re.compile(r"(\d{1,9})([smhdw]?)")


def seconds_of(text: str) -> int:
    """Return a time in seconds: `90`, `90s`, `15m`, `12h`, `2d`, `1w`.

    Raises `ConfigurationError` for anything else.
    """
    found = _TIME.fullmatch(text.strip().lower())
    if found is None:
        raise ConfigurationError(f"--older-than is {text!r}; write a time like 90s, 12h or 2d")
    return int(found[1]) * _SECONDS[found[2]]


def purge_runs(
    runs: Mapping[str, Any], data: Path, *, dry_run: bool, yes: bool, json: bool
) -> None:
    """Remove the ended `runs` (the arguments of `fleet.runs.purge`), or only count them."""

    async def remove(fleet: AsyncFleet) -> None:
        if not dry_run and not yes:
            _confirm(await fleet.runs.purge(**runs, dry_run=True))
        report = _report if sys.stderr.isatty() else None
        done = await fleet.runs.purge(**runs, dry_run=dry_run, on_progress=report)
        if json:
            print_json({"runs": done, "dry_run": dry_run})
        else:
            sys.stdout.write(f"{_runs(done)} {'would be removed' if dry_run else 'removed'}\n")

    with_fleet(data, remove)


def _confirm(found: int) -> None:
    """Ask on the terminal. Raises `ConfigurationError` for no terminal or any answer but yes."""
    if not sys.stdin.isatty():
        raise ConfigurationError("no terminal to confirm on: add --yes, or look with --dry-run")
    sys.stderr.write(f"Remove {_runs(found)} for good? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
        raise ConfigurationError("nothing was removed")


def _runs(number: int) -> str:
    return f"{count(number)} ended {'run' if number == 1 else 'runs'}"


def _report(done: int) -> None:
    sys.stderr.write(f"\r{count(done)} runs\x1b[K" if done else "")
