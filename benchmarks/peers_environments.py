"""Makes the environment of each peer once, and tells the versions in it.

Virtual environments come from uv and npm, named by a digest of what they hold: another list is
another environment. Nothing of this enters the project's own dependencies.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from peers_catalog import Environment
from rich.console import Console

PYTHON = str(Path(getattr(sys, "_base_executable", sys.executable)).resolve())
"""Every peer runs on the interpreter that runs this: builds of one version differ in speed."""

RESTATE_PACKAGE = "@restatedev/restate-server"
RESTATE_PROGRAM = Path("node_modules/.bin/restate-server")
DONE = "complete"

console = Console(stderr=True)


def default_cache() -> Path:
    """Return the folder in the user's cache directory."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "stepfleet-peers"


def python_of(environment: Environment, cache: Path) -> str:
    """Return the interpreter of an environment, which is made where it is missing.

    Raises `LookupError` without uv, and `subprocess.CalledProcessError` if packages are not to
    be had.
    """
    if not environment.packages:
        return sys.executable
    folder = _folder(cache, environment.name, [PYTHON, *environment.packages])
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    if not (folder / DONE).exists():
        uv = _program("uv", "install it from https://docs.astral.sh/uv/")
        console.print(f"making the environment of {environment.name} in {folder}")
        _run(uv, "venv", "--quiet", "--clear", "--python", PYTHON, str(folder))
        _run(uv, "pip", "install", "--quiet", "--python", str(python), *environment.packages)
        (folder / DONE).touch()
    return str(python)


def restate_program(cache: Path) -> str:
    """Return the Restate server's program, fetched from npm where it is missing."""
    folder = _folder(cache, "restate-server", [RESTATE_PACKAGE])
    if not (folder / DONE).exists():
        npm = _program("npm", "install Node.js")
        console.print(f"fetching {RESTATE_PACKAGE} into {folder}")
        folder.mkdir(parents=True, exist_ok=True)
        _run(npm, "install", "--silent", "--prefix", str(folder), RESTATE_PACKAGE)
        (folder / DONE).touch()
    native = sorted(folder.glob("node_modules/@restatedev/restate-server-*/bin/restate-server"))
    return str(native[0] if native else folder / RESTATE_PROGRAM)


def versions(environment: Environment, python: str) -> dict[str, str]:
    """Return the versions of the packages that matter in an environment."""
    script = (
        "import importlib.metadata as m, json, sys;"
        "print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"
    )
    answer = subprocess.run(
        [python, "-c", script, *environment.shown], check=True, capture_output=True, text=True
    )
    found: dict[str, str] = json.loads(answer.stdout)
    return found


def _folder(cache: Path, name: str, packages: list[str]) -> Path:
    digest = hashlib.sha256(" ".join(packages).encode()).hexdigest()[:10]
    return cache.resolve() / f"{name}-{digest}"


def _program(name: str, remedy: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise LookupError(f"{name} is not on PATH: {remedy}")
    return path


def _run(*command: str) -> None:
    subprocess.run(command, check=True, stdout=sys.stderr)
