"""What `stepfleet purge` asks, removes and says."""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from stepfleet.orchestrator.cli.setup.with_fleet import with_fleet
from stepfleet.orchestrator.cli.terminal.format import count
from stepfleet.orchestrator.cli.terminal.output import print_json
from stepfleet.orchestrator.client.fleet import AsyncFleet
from stepfleet.orchestrator.errors import ConfigurationError

_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_TIME = re.compile(r"(\d{1,9})([smhdw]?)")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the command line says of the runs that are to go."""

    batch: str | None
    statuses: tuple[str, ...]
    older_than: str
    dry_run: bool
    json: bool


def seconds_of(told: str) -> int:
    """Return a time in seconds: `90`, `90s`, `15m`, `12h`, `2d`, `1w`.

    Raises `ConfigurationError` for anything else.
    """
    found = _TIME.fullmatch(told.strip().lower())
    if found is None:
        raise ConfigurationError(f"--older-than is {told!r}; write a time like 90s, 12h or 2d")
    return int(found[1]) * _SECONDS[found[2]]


def purge_runs(wanted: Wanted, data: Path, *, yes: bool) -> int:
    """Remove ended runs, or say how many it would be; return the exit code."""
    older_than = seconds_of(wanted.older_than)

    async def remove(fleet: AsyncFleet) -> int:
        async def purge(*, dry_run: bool, say: bool) -> int:
            return await fleet.runs.purge(
                batch=wanted.batch,
                statuses=wanted.statuses,
                older_than=older_than,
                dry_run=dry_run,
                on_progress=_say if say else None,
            )

        if not wanted.dry_run and not yes:
            _confirm(await purge(dry_run=True, say=False))
        done = await purge(dry_run=wanted.dry_run, say=sys.stderr.isatty())
        verb = "would be removed" if wanted.dry_run else "removed"
        if wanted.json:
            print_json({"runs": done, "dry_run": wanted.dry_run})
        else:
            sys.stdout.write(f"{_runs(done)} {verb}\n")
        return 0

    return with_fleet(data, remove)


def _confirm(found: int) -> None:
    """Ask on the terminal. Raises `ConfigurationError` where nobody is there to say yes."""
    if not sys.stdin.isatty():
        raise ConfigurationError("nobody can be asked here: add --yes, or look with --dry-run")
    sys.stderr.write(f"Remove {_runs(found)} for good? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
        raise ConfigurationError("nothing was removed")


def _runs(number: int) -> str:
    return f"{count(number)} ended {'run' if number == 1 else 'runs'}"


def _say(done: int) -> None:
    sys.stderr.write(f"\r{count(done)} runs\x1b[K" if done else "")
