"""Which build of stepfleet this is: its version, and the commit that it was built from.

Workers report both, so that a fleet of several builds is seen. Only the standard library: the build
(`deploy/build_hook.py`) runs this file too.
"""

import re
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

COMMIT_FILE = "commit.txt"
"""Beside the package's `__init__.py` where it was built, with the commit."""
SHOWN = 8
"""Digits of a commit that are shown."""
_COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")


@dataclass(frozen=True, slots=True)
class Build:
    """A build of stepfleet. `version` and `commit` (40 or 64 hex digits) are '' where unknown."""

    version: str = ""
    commit: str = ""

    def __str__(self) -> str:
        """Return both as they are shown, such as `0.1.0+63c89e0c`; '' where both are unknown."""
        return f"{self.version}+{self.commit[:SHOWN]}" if self.commit else self.version


@cache
def own_build() -> Build:
    """Return the build that runs here. Changes of a checkout without a commit are not seen."""
    version = ""
    with suppress(metadata.PackageNotFoundError):
        version = metadata.version("stepfleet")
    # The package, or the checkout: the folder of `orchestrator`, which may be a link.
    return Build(version, commit_of(Path(__file__).resolve().parent.parent))


def commit_of(folder: Path) -> str:
    """Return the commit of a built package, or of a checkout's root; '' where it has none."""
    built = _text(folder / COMMIT_FILE)
    return built if _COMMIT.fullmatch(built) else checked_out(folder)


def checked_out(root: Path) -> str:
    """Return the commit that is checked out at `root`, a clone or worktree, without running git."""
    git = root / ".git"
    if git.is_file():  # of a worktree, or a submodule
        git = root / _text(git).removeprefix("gitdir:").strip()
    head = _text(git / "HEAD")
    if not head.startswith("ref:"):
        return head if _COMMIT.fullmatch(head) else ""
    name = head.removeprefix("ref:").strip()
    common = git / (_text(git / "commondir") or ".")
    for place in (git / name, common / name):
        if _COMMIT.fullmatch(found := _text(place)):
            return found
    for line in _text(common / "packed-refs").splitlines():
        commit, _, packed = line.partition(" ")
        if packed == name and _COMMIT.fullmatch(commit):
            return commit
    return ""


def _text(file: Path) -> str:
    """Return a small file's text; '' where it cannot be read."""
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""
