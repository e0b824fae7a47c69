"""Starts programs in processes forked from one that has imported what they import.

Imports take most of the processor time of a start, and the tests start workers and commands by the
hundred. What is forked goes on as `python -m PROGRAM` does behind its imports: a process of its
own, with its own environment, folder, arguments and files; nothing of the program has run before
the fork. Who wants a cold start takes `subprocess.Popen` instead.

Run as a program, this file is the server: one for each program, as they import different things,
and one for the commands that serve Flower.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import pkgutil
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

CELERY = "celery"
COMMAND = "stepfleet.orchestrator.cli"
KEEPER = "stepfleet.worker.runtime.keeper"
_FOR_WORKERS = (
    "celery.bin.celery",
    "celery.bin.worker",
    "celery.apps.worker",
    "celery.worker.consumer",
    "celery.worker.strategy",
    "celery.concurrency.prefork",
    "celery.app.amqp",
    "celery.app.control",
    "celery.app.events",
    "celery.app.log",
    "celery.backends.redis",
    "celery.events.dispatcher",
    "celery.fixups.django",
    "celery.loaders.app",
    "celery.utils.static",
    "kombu.transport.redis",
    "stepfleet.worker.app",
    "stepfleet.worker.engine.consumer",
)
_FOR_KEEPERS = (
    "celery.app.amqp",
    "kombu.transport.memory",
    "stepfleet.orchestrator.batches.scheduling",
    "stepfleet.worker.events.subscribers",
    "stepfleet.worker.runtime.small_server",
    "stepfleet.worker.runtime.upkeep",
)
"""Not the module itself, which is then run."""
_FOR_COMMANDS = (
    "celery.app",
    "kombu.transport.redis",
    "stepfleet.orchestrator.client.blocking",
)
FLOWER = (COMMAND, "flower.command", "stepfleet.orchestrator.dashboard")
"""The command, and packages that `stepfleet flower` imports and other commands do not."""
AT_IMPORT = dict(os.environ)
"""The environment of the imports, whatever a test has set when the first program is asked for."""
_POLL_SECONDS = 0.01
_RUNNING = 1000
"""Stands for an exit code that is not known yet."""


class Forked:
    """A running program, with as much of `subprocess.Popen` as tests use."""

    def __init__(self, ask: Callable[[dict[str, Any]], Any], pid: int) -> None:
        self._ask = ask
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative where a signal ended it; None while it runs."""
        if self._code is None:
            self._code = self._ask({"poll": self.pid})
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code. Raises `subprocess.TimeoutExpired` after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(_POLL_SECONDS)  # polls, to the caller's deadline
        return code

    def send_signal(self, which: int) -> None:
        """Send a signal to the process, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, which)

    def kill(self) -> None:
        """End it by SIGKILL."""
        self.send_signal(signal.SIGKILL)


def start(
    program: str | tuple[str, ...],
    arguments: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: Path,
    out: Path,
    err: Path,
    given: Path = Path(os.devnull),
) -> Forked:
    """Start `CELERY`, `COMMAND`, `KEEPER` or `FLOWER`; what it says is added to `out` and `err`."""
    ask = _client(*([program] if isinstance(program, str) else program)).ask
    files = [str(given), str(out), str(err)]
    asked = {"arguments": list(arguments), "env": dict(env), "cwd": str(cwd), "files": files}
    return Forked(ask, ask(asked))


def run(
    program: str,
    arguments: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: Path,
    given: Path = Path(os.devnull),
    within: float = 60.0,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end. Raises `subprocess.TimeoutExpired` after `within` seconds."""
    with tempfile.TemporaryDirectory(prefix="sf-") as aside:
        out, err = Path(aside, "out"), Path(aside, "err")
        process = start(program, arguments, env=env, cwd=cwd, out=out, err=err, given=given)
        try:
            code = process.wait(within)
        finally:
            process.kill()
        said = [one.read_text("utf-8", "replace") for one in (out, err)]
    return subprocess.CompletedProcess([program, *arguments], code, *said)


class _Client:
    """The tests' end of the connection; the server ends when it is closed."""

    def __init__(self, program: str, *imports: str) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, program, str(theirs.fileno()), *imports],
                env=AT_IMPORT,
                pass_fds=[theirs.fileno()],
            )
        self._socket = ours
        self._lines = ours.makefile("rwb")
        self._lock = threading.Lock()

    def ask(self, what: dict[str, Any]) -> Any:
        with self._lock:
            self._lines.write(json.dumps(what).encode() + b"\n")
            self._lines.flush()
            answer = self._lines.readline()
        assert answer, "the server that forks for the tests ended"
        return json.loads(answer)

    def close(self) -> None:
        self._lines.close()
        self._socket.close()
        self._process.wait(timeout=60)


@functools.cache
def _client(program: str, *imports: str) -> _Client:
    """Start this process's server with the first program that is asked for."""
    client = _Client(program, *imports)
    atexit.register(client.close)
    return client


# ------------------------------------------------------------------------------------ server


def main(program: str, descriptor: int, *imports: str) -> None:
    """Import, and fork whenever asked; a fork returns from the service to become the program."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the tests' affair
    also = [module for name in imports for module in _all_of(name)]
    for module in (*_modules(program), *also):
        importlib.import_module(module)
    assert threading.active_count() == 1, "a fork would lose the threads that imports started"
    gc.collect()
    gc.freeze()
    asked = _serve(socket.socket(fileno=descriptor))
    if asked is not None:
        _become(program, asked)


def _modules(program: str) -> Sequence[str]:
    if program == CELERY:
        return _FOR_WORKERS
    if program == KEEPER:
        return _FOR_KEEPERS
    # Commands import what they need when they run; what they all come to is the client.
    return [*_all_of(program), *_FOR_COMMANDS]


def _all_of(name: str) -> list[str]:
    """Return the names of a module, or of a package and all that is in it."""
    path = getattr(importlib.import_module(name), "__path__", ())
    found = [one.name for one in pkgutil.walk_packages(path, f"{name}.")]
    return [name, *(one for one in found if not one.endswith(".__main__"))]


def _serve(connection: socket.socket) -> dict[str, Any] | None:
    """Answer until the tests are over: None. In a fork: what it shall become."""
    codes: dict[int, int] = {}
    lines = connection.makefile("rwb")
    for line in lines:
        asked: dict[str, Any] = json.loads(line)
        answer: int | None
        if "poll" in asked:
            answer = _exit_code(asked["poll"], codes)
        else:
            answer = os.fork()
            if answer == 0:
                os.close(connection.detach())
                return asked
            codes[answer] = _RUNNING
        lines.write(json.dumps(answer).encode() + b"\n")
        lines.flush()
    for pid, code in codes.items():
        if code == _RUNNING:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return None


def _exit_code(pid: int, codes: dict[int, int]) -> int | None:
    if codes[pid] == _RUNNING:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended == 0:
            return None
        codes[pid] = os.waitstatus_to_exitcode(status)
    return codes[pid]


def _become(program: str, asked: dict[str, Any]) -> None:
    """Go on as `python -m PROGRAM` with the environment, folder, arguments and files asked for."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    time.tzset()  # the C library has read the time zone of the imports' environment
    modes = (os.O_RDONLY, *[os.O_WRONLY | os.O_APPEND | os.O_CREAT] * 2)
    for number, (name, mode) in enumerate(zip(asked["files"], modes, strict=True)):
        opened = os.open(name, mode)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin = sys.__stdin__ = _text(0, "r", sys.stdin)  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = _text(1, "w", sys.stdout)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _text(2, "w", sys.stderr)  # type: ignore[misc]
    sys.stderr.reconfigure(line_buffering=True)
    given = asked["env"].get("PYTHONPATH", "")
    sys.path[:1] = [asked["cwd"], *(part for part in given.split(os.pathsep) if part)]
    sys.argv[1:] = asked["arguments"]
    runpy.run_module(program, run_name="__main__", alter_sys=True)


def _text(descriptor: int, mode: str, like: TextIO) -> Any:
    return os.fdopen(descriptor, mode, encoding=like.encoding, errors=like.errors, closefd=False)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
