"""What a program loads, seen in a process of its own."""

import subprocess
import sys


def loaded_by(program: str) -> set[str]:
    """Return the names of all modules that are loaded when the program ends."""
    command = [sys.executable, "-c", f"{program}\nimport sys; print(*sys.modules)"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())
