"""A real `stepfleet keeper` process, its log, and what it answers over HTTP."""

import contextlib
import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Self

from support.deadlines import wait_until
from support.workers.fleet_workers import QUICK
from support.workers.logged_process import LoggedProcess
from support.workers.warm_starts import KEEPER, start

COMMAND = [sys.executable, "-m", "stepfleet.orchestrator.cli", "keeper"]
_ADDRESS = re.compile(r"(http://127\.0\.0\.1:\d+) serves")


class KeeperProcess(LoggedProcess):
    """One keeper on a Redis; `env` is added to what it is told.

    It is started warm, or by the command itself where the start is `cold`.
    """

    def __init__(
        self, folder: Path, redis_url: str, *, name: str = "k1", env: dict[str, str] | None = None
    ) -> None:
        super().__init__(name, folder / f"{name}.log")
        self._folder = folder
        self._env = {**os.environ, **QUICK, "STEPFLEET_REDIS_URL": redis_url, **(env or {})}

    def launch(self, port: int = 0, *, cold: bool = False) -> Self:
        """Start it without waiting for it."""
        arguments, log = ["--port", str(port)], self.log_path
        if not cold:
            folder = self._folder
            self._process = start(KEEPER, arguments, env=self._env, cwd=folder, out=log, err=log)
            return self
        command = [*COMMAND, *arguments]
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                command, env=self._env, cwd=self._folder, stdout=out, stderr=out
            )
        return self

    def start(self, *, cold: bool = False) -> Self:
        """Start it, and return when it keeps the fleet."""
        self.launch(cold=cold)
        wait_until(lambda: self._address() is not None, within=60, what="the keeper")
        return self

    def _address(self) -> str | None:
        assert self.exit_code is None, f"the keeper ended at its start:\n{self.log}"
        found = _ADDRESS.findall(self.log)
        return found[-1] if found else None

    def get(self, path: str, address: str | None = None) -> tuple[int, Any]:
        """Return status and body of a page; JSON where it is that."""
        url = f"{address or self._address()}{path}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:  # noqa: S310 - ours
                return answer.status, _read(answer)
        except urllib.error.HTTPError as error:
            with contextlib.closing(error):
                return error.code, _read(error)

    def end(self) -> None:
        """End it at once."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def _read(answer: Any) -> Any:
    body = answer.read()
    return json.loads(body) if answer.headers.get_content_type() == "application/json" else body
