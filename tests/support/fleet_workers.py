"""Real Stepfleet workers on a test's Redis: started, killed, frozen and stopped at will."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from deadlines import wait_until

AGENTS = Path(__file__).parent.parent / "acceptance" / "agents" / "agents.py"
QUICK = {
    "STEPFLEET_LEASE": "2",
    "STEPFLEET_GRACE": "1",
    "STEPFLEET_RESCUE_INTERVAL": "0.3",
    "STEPFLEET_SLOTS": "50",
    "STEPFLEET_DRAIN": "2",
}


class FleetWorker:
    """One `celery -A stepfleet.worker.app worker` process, and its log."""

    def __init__(
        self,
        folder: Path,
        redis_url: str,
        model_url: str,
        *,
        name: str = "w1",
        options: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
        program: tuple[str, ...] = ("-m", "celery"),
    ) -> None:
        self.name = f"{name}@test"
        self.log_path = folder / f"{name}.log"
        self._command = [
            *(sys.executable, *program, "-A", "stepfleet.worker.app", "worker"),
            *("-n", self.name, "-l", "INFO", "--without-gossip", "--without-mingle", *options),
        ]
        self._env = {
            **os.environ,
            **QUICK,
            "STEPFLEET_REDIS_URL": redis_url,
            "STEPFLEET_AGENTS": str(AGENTS),
            "OPENAI_BASE_URL": model_url,
            "OPENAI_API_KEY": "sk-test-canary",
            **(env or {}),
        }
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def launch(self) -> "FleetWorker":
        """Start the process without waiting for it."""
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, env=self._env, cwd=self._folder, stdout=log, stderr=log
            )
        return self

    def start(self) -> "FleetWorker":
        """Start the process and return when it consumes."""
        self.launch()
        wait_until(self._is_ready, within=30, what=f"{self.name} ready")
        return self

    def _is_ready(self) -> bool:
        assert self.exit_code is None, f"{self.name} ended at its start:\n{self.log}"
        return f"{self.name} ready." in self.log

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        assert self._process is not None
        return self._process.poll()

    def signal(self, which: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(which)

    def wait(self, within: float = 20) -> int:
        """Return the exit code; fail where the worker does not end in time."""
        assert self._process is not None
        try:
            return self._process.wait(timeout=within)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"{self.name} did not end within {within} s:\n{self.log}"
            ) from None

    def end(self) -> None:
        """End it at once, with its children."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGCONT)
        subprocess.run(["pkill", "-KILL", "-P", str(self.pid)], check=False)
        self._process.kill()
        self._process.wait()
