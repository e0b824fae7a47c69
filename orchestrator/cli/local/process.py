"""One child process: started, logged and ended. Does not know its work."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

_KEPT_LINES = 15


class Child:
    """A process with the parent-death watchdog, a log file, and no signals of the terminal."""

    def __init__(self, name: str, argv: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self.name = name
        self.log = log
        self._argv = argv
        self._env = env
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """The process's id; 0 before its first start."""
        return self._process.pid if self._process else 0

    async def start(self, *, answers: bool = False) -> None:
        """Start it; with `answers` its standard output can be read here, and is not logged."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._argv,
                env=dict(self._env),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE if answers else descriptor,
                stderr=descriptor,
                # Ctrl-C in the terminal is handled here and passed on.
                start_new_session=True,
            )
        finally:
            os.close(descriptor)

    async def first_line(self, *, within: float) -> str:
        """Return its first line of output; empty where it ended. Raises `TimeoutError`."""
        if self._process is None or self._process.stdout is None:
            return ""
        line = await asyncio.wait_for(self._process.stdout.readline(), within)
        return line.decode(errors="replace").strip()

    async def ended(self) -> int:
        """Wait for its end; return the exit code, negative for a signal."""
        return await self._process.wait() if self._process else 0

    async def stop(self, *, within: float) -> None:
        """End it with SIGTERM, and after `within` seconds with SIGKILL."""
        if self._process is None:
            return
        self.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), within)
        except TimeoutError:
            self.kill()
            await self._process.wait()

    def terminate(self) -> None:
        """Send it SIGTERM; on a second one, a worker releases its steps at once."""
        with contextlib.suppress(ProcessLookupError):
            if self._process is not None:
                self._process.terminate()

    @property
    def runs(self) -> bool:
        """Whether it has been started and has not ended, without waiting."""
        if self._process is None or self._process.returncode is not None:
            return False
        try:
            look = os.WEXITED | os.WNOWAIT | os.WNOHANG
            return os.waitid(os.P_PID, self._process.pid, look) is None
        except ChildProcessError:
            return False

    def kill(self) -> None:
        """End it at once, with the processes that it started."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def log_tail(self) -> str:
        """Return the last lines of its log."""
        try:
            lines = self.log.read_text(errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join(line for line in lines[-_KEPT_LINES:] if line.strip())
