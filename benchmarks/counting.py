"""Counts instructions in user space by valgrind: caches and other programs do not change them.

What the kernel does for a process is not in it. A program under valgrind takes some 50 times as
long, and what it does by the clock (polls, renewals) counts the more, the longer it takes: let
nothing else run, and enough steps.
"""

import contextlib
import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_SECONDS = 300.0
_OPTIONS = ("--tool=callgrind", "--quiet")


@dataclass(frozen=True)
class Counted:
    """A program that valgrind counts; `before` goes in front of its command line."""

    file: Path

    @property
    def before(self) -> Sequence[str]:
        """Return the words that start valgrind."""
        return ("valgrind", *_OPTIONS, f"--callgrind-out-file={self.file}")

    def since(self, pid: int) -> int:
        """Return the instructions of the running process since the last call, or its start."""
        command = ["callgrind_control", "--dump", str(pid)]
        subprocess.run(command, capture_output=True, timeout=_SECONDS, check=True)
        return _summary(max(self.file.parent.glob(f"{self.file.name}.*"), key=_part))

    def in_all(self) -> int:
        """Return the instructions of the process, which has ended."""
        return _summary(self.file)


@contextlib.contextmanager
def counted_redis(folder: Path) -> Iterator[Counted]:
    """Have a `redis-server` that is started meanwhile run under valgrind."""
    counted, path = Counted(folder / "redis"), os.environ["PATH"]
    place = folder / "bin"
    place.mkdir()
    script = place / "redis-server"
    words = " ".join(counted.before)
    script.write_text(f'#!/bin/sh\nPATH="{path}"\nexec {words} redis-server "$@"\n')
    script.chmod(0o755)
    os.environ["PATH"] = f"{place}{os.pathsep}{path}"
    try:
        yield counted
    finally:
        os.environ["PATH"] = path


def _part(file: Path) -> int:
    return int(file.suffix[1:])


def _summary(file: Path) -> int:
    with file.open(encoding="utf-8", errors="replace") as lines:
        found = [int(line.split()[1]) for line in lines if line.startswith(("summary:", "totals:"))]
    return found[0]
