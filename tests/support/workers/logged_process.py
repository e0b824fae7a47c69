"""A process that a test has started, warm or cold, and its log."""

import signal
import subprocess
from pathlib import Path

from support.workers.warm_starts import Forked


class LoggedProcess:
    """A process by its `name`; what it says goes to the file `log_path`."""

    def __init__(self, name: str, log_path: Path) -> None:
        self.name = name
        self.log_path = log_path
        self._process: subprocess.Popen[bytes] | Forked | None = None

    @property
    def log(self) -> str:
        """All that it has said; nothing before its first word."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process is not None
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Its exit code; None while it runs."""
        assert self._process is not None
        return self._process.poll()

    def signal(self, which: signal.Signals) -> None:
        """Send it a signal."""
        assert self._process is not None
        self._process.send_signal(which)

    def wait(self, within: float = 60) -> int:
        """Return its exit code; fail where it does not end in time."""
        assert self._process is not None
        try:
            return self._process.wait(timeout=within)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"{self.name} did not end within {within} s:\n{self.log}"
            ) from None
