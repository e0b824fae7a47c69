"""Servers that nobody here wrote, as real processes, each in an environment of its own.

An environment is made once, in `.venv-servers`, and kept: its first use needs the package index.
"""

import contextlib
import hashlib
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from support.deadlines import wait_until

FOLDER = Path(__file__).parents[3] / ".venv-servers"
STARTS = 180.0


def environment(*requirements: str) -> Path:
    """Return the programs of an environment with these packages."""
    name = hashlib.sha256(repr((sys.version, requirements)).encode()).hexdigest()[:12]
    place = FOLDER / name
    ready = place / "ready"
    if not ready.exists():
        own = Path(f"{sys.prefix}-uv") / "bin" / "uv"  # as tests/check makes it
        uv = shutil.which("uv") or str(own)
        python = str(place / "bin" / "python")
        subprocess.run([uv, "venv", "-q", "--clear", "-p", sys.executable, place], check=True)
        install = [uv, "pip", "install", "-q", "-p", python, *requirements]
        subprocess.run(install, check=True)
        ready.touch()
    return place / "bin"


def free_port() -> int:
    """Return a port on which nobody listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def serving(
    command: list[str], ready: str, *, log: Path, env: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server from the time when `ready` answers; kill it at the end."""
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=env, cwd=log.parent)

    def answers() -> bool:
        assert process.poll() is None, f"the server has ended:\n{log.read_text()[-3000:]}"
        with contextlib.suppress(URLError, ConnectionError, TimeoutError):
            urlopen(ready, timeout=5).close()  # noqa: S310 - the server's own address
            return True
        return False

    try:
        wait_until(answers, within=STARTS, what=f"{command[0]} to answer")
        yield process
    finally:
        process.kill()
        process.wait()
