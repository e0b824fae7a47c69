"""Runs the real `stepfleet` command in a folder of a test's own, with a clean environment.

Knows how commands are started and ended; what they should say is the tests' business.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import psutil
from support.deadlines import wait_until
from support.workers import warm_starts

COMMAND = [sys.executable, "-m", "stepfleet.orchestrator.cli"]
_KEPT = ("PATH", "HOME", "LANG", "TMPDIR", "COVERAGE_PROCESS_START")
_QUICK = {
    "STEPFLEET_LEASE": "3",
    "STEPFLEET_GRACE": "1",
    "STEPFLEET_RESCUE_INTERVAL": "0.3",
    "STEPFLEET_DRAIN": "3",
    "STEPFLEET_NO_CHECK": "1",  # tests count the calls of their models
    "COLUMNS": "200",
}

AGENTS = '''\
from stepfleet.orchestrator.agents.agent import Agent
from stepfleet.orchestrator.tools import tool


@tool(read_only=True)
def look(what: str) -> str:
    """Look something up."""
    return f"seen {what}"


@tool
def broken(what: str) -> str:
    """Fail."""
    raise ValueError(f"cannot {what}")


solver = Agent(
    "solver",
    model="openai:gpt-4o-mini",
    instructions="SECRET-PROMPT: be brief.",
    tools=[look, broken],
    max_steps=4,
)
'''

RULES = '''\
from stepfleet.worker.testing import Reply, ToolCallReply


def rules(request):
    """Two lookups and an answer; a question says by its words what goes wrong, and how slowly."""
    question = request.question
    latency = 0.3 if "slow" in question else 0.01
    if "linger" in question:
        latency = 2.0
    if "hang" in question and request.turn > 1:
        latency = 60.0
    if "broken" in question:
        return Reply(tool_calls=(ToolCallReply("broken", {"what": question}),), latency=latency)
    if "forever" in question or request.turn < 3:
        what = f"{request.turn}"
        return Reply(tool_calls=(ToolCallReply("look", {"what": what}),), latency=latency)
    return Reply(f"answer to {question}", latency=latency)
'''


class CommandLine:
    """A folder with `agents.py` and `rules.py`, and `stepfleet` commands run in it."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.folder = folder
        self._env = {name: os.environ[name] for name in _KEPT if name in os.environ}
        self._env |= _QUICK | environment
        self._started: list[warm_starts.Forked] = []
        self.write("agents.py", AGENTS)
        self.write("rules.py", RULES)

    def write(self, name: str, text: str) -> Path:
        """Write a file of the folder."""
        path = self.folder / name
        path.write_text(text)
        return path

    def questions(self, *inputs: str, name: str = "questions.jsonl") -> str:
        """Write a batch file with these inputs and ids q0, q1, ...; return its name."""
        lines = [
            orjson.dumps({"id": f"q{number}", "input": text}).decode()
            for number, text in enumerate(inputs)
        ]
        self.write(name, "".join(f"{line}\n" for line in lines))
        return name

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Return the JSON lines of a file; none where it does not exist yet."""
        whole = b""
        with contextlib.suppress(FileNotFoundError):
            whole = (self.folder / name).read_bytes().rpartition(b"\n")[0]
        return [orjson.loads(line) for line in whole.splitlines()]

    def __call__(
        self,
        *arguments: str,
        within: float = 60.0,
        feed: str | None = None,
        **environment: str,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, warm; `feed` names the file that it reads as standard input."""
        return warm_starts.run(
            warm_starts.COMMAND,
            arguments,
            env={**self._env, **environment},
            cwd=self.folder,
            given=self.folder / feed if feed else Path(os.devnull),
            within=within,
        )

    def start(self, *arguments: str, **environment: str) -> warm_starts.Forked:
        """Start a command that lasts, warm; its output goes to `started.out` and `started.err`.

        These are emptied for it. What an earlier command says from then on is added.
        """
        is_flower = arguments[0] == "flower"
        started = warm_starts.start(
            warm_starts.FLOWER if is_flower else warm_starts.COMMAND,
            arguments,
            env={**self._env, **environment},
            cwd=self.folder,
            out=self.write("started.out", ""),
            err=self.write("started.err", ""),
        )
        self._started.append(started)
        return started

    def stop(self, *, within: float = 60.0) -> None:
        """End what was started, by SIGTERM, and wait for it."""
        for started in self._started:
            if started.poll() is None:
                started.send_signal(signal.SIGTERM)
            started.wait(within)

    @property
    def said(self) -> str:
        """What the last started command has said on standard error."""
        return (self.folder / "started.err").read_text()

    def until_said(self, text: str, *, within: float = 60.0) -> None:
        """Wait until the started command has said `text`."""
        wait_until(lambda: text in self.said, within=within, what=f"{text!r} on stderr")

    def processes(self) -> list[psutil.Process]:
        """Return all processes that work in the folder or on a file of it."""
        return [one for one in psutil.process_iter() if _belongs_to(one, str(self.folder))]

    def running(self, module: str) -> list[psutil.Process]:
        """Return those of the processes that run a module."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):  # it ends while it is looked at
                found += [process] if module in process.cmdline() else []
        return found

    def until_all_ended(self, *, within: float = 60.0) -> None:
        """Wait until nothing that was started is left."""

        def nothing_left() -> bool:
            return not self.processes()

        wait_until(nothing_left, within=within, what="the end of all processes")

    def end(self) -> None:
        """End whatever is left."""
        for started in self._started:
            if started.poll() is None:
                started.send_signal(signal.SIGKILL)
            started.wait()
        for process in self.processes():
            _quietly(process.kill)


def _belongs_to(process: psutil.Process, folder: str) -> bool:
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return process.cwd().startswith(folder) or any(folder in one for one in process.cmdline())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def _quietly(action: Callable[[], object]) -> None:
    try:
        action()
    except psutil.NoSuchProcess:
        return
