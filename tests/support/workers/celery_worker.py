"""One `celery worker` process: started, killed, frozen and stopped at will, and its log.

Starts are warm, from a process that has the imports, wherever that makes no difference: what
Celery and OpenTelemetry read when they are imported takes a cold one.
"""

import contextlib
import subprocess
import sys
from pathlib import Path
from typing import Self

import psutil
from support.deadlines import wait_until
from support.workers.frozen import freeze
from support.workers.logged_process import LoggedProcess
from support.workers.warm_starts import AT_IMPORT, CELERY, Forked, start

PROGRAM = ("-m", CELERY)
_READ_AT_IMPORT = ("CELERY_", "OTEL_")
_PATCH_AT_IMPORT = ("gevent", "eventlet")


class CeleryWorker(LoggedProcess):
    """A worker of the app `app`; `env` is its whole environment, `program` what Python runs."""

    def __init__(
        self,
        folder: Path,
        *,
        app: str,
        name: str,
        options: tuple[str, ...],
        env: dict[str, str],
        cwd: Path,
        program: tuple[str, ...] = PROGRAM,
    ) -> None:
        super().__init__(name, folder / f"{name.partition('@')[0]}.log")
        self._program = program
        self._arguments = [
            *("-A", app, "worker", "-n", name, "-l", "INFO"),
            *("--without-gossip", "--without-mingle", *options),
        ]
        self._env = env
        self._cwd = cwd

    def start(self) -> Self:
        """Start the process and return when it consumes."""
        self.launch()
        wait_until(self._is_ready, within=60, what=f"{self.name} ready")
        return self

    def launch(self) -> Self:
        """Start the process without waiting for it."""
        self._process = self._warm_start() if self._warm() else self._cold_start()
        return self

    def _warm_start(self) -> Forked:
        log = self.log_path
        return start(CELERY, self._arguments, env=self._env, cwd=self._cwd, out=log, err=log)

    def _cold_start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, *self._program, *self._arguments]
        with self.log_path.open("ab") as log:
            return subprocess.Popen(command, env=self._env, cwd=self._cwd, stdout=log, stderr=log)

    def _warm(self) -> bool:
        known = {*self._env, *AT_IMPORT}
        changed = {name for name in known if self._env.get(name) != AT_IMPORT.get(name)}
        return (
            self._program == PROGRAM
            and not any(name.startswith(_READ_AT_IMPORT) for name in changed)
            and not any(pool in self._arguments for pool in _PATCH_AT_IMPORT)
        )

    def _is_ready(self) -> bool:
        assert self.exit_code is None, f"{self.name} ended at its start:\n{self.log}"
        return f"{self.name} ready." in self.log

    def end(self) -> None:
        """End it at once, with its children."""
        if self._process is None or self._process.poll() is not None:
            return
        # A pool would start another child for one that is killed before its parent.
        with contextlib.suppress(psutil.NoSuchProcess):
            freeze(self.pid)
        for process in _with_children(self.pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()


def _with_children(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        return [*parent.children(recursive=True), parent]
    return []
