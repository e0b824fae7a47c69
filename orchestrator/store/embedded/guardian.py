"""The process that ends a private server when its last user is gone.

Run as a program by its path, apart from the package, so that it stays small: it must import the
standard library only. Users share a file lock, which the operating system drops when they end,
however they end; the guardian waits to hold that lock alone. It lives in a session of its own, so
that Ctrl-C in the user's terminal reaches neither it nor the server.

A rewrite of the append-only file that is under way when the last user leaves goes on to its end,
for minutes where there are many GB: interrupted each time, the file would grow without bound. New
users meanwhile use the running server. Where the server dies, the process that rewrites for it dies
too, since nobody would use its result.

Should the guardian itself be killed, Linux ends the server too. Elsewhere the server stays until
the folder's next start, which ends it and starts anew.
"""

import contextlib
import ctypes
import fcntl
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

ALREADY_GUARDED = 3
_PR_SET_PDEATHSIG = 1
_REWRITE_SECONDS = 900.0
_PAUSE_SECONDS = 0.2
_ENDING_SECONDS = 60.0


def guard(folder: Path, binary: str) -> int:
    """Start the server on ``folder/redis.conf``; return its exit code when it has ended."""
    os.umask(0o077)
    server_lock = _open(folder / "server.lock")
    try:
        fcntl.flock(_open(folder / "guardian.lock"), fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.lockf(server_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return ALREADY_GUARDED
    fcntl.lockf(server_lock, fcntl.LOCK_UN)  # the server takes it for itself
    if os.fork():
        os._exit(0)  # our starter waits for this process only; the child keeps the locks
    _raise_open_files_limit()
    server = _start_server(folder, binary, server_lock)
    for ignored in (signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    # Until its end is taken note of, by `wait`, no other process can have the server's id.
    signal.signal(signal.SIGTERM, lambda *_: os.kill(server.pid, signal.SIGTERM))
    ended = threading.Event()
    threading.Thread(target=_end_when_unused, args=(folder, server.pid, ended), daemon=True).start()
    if hasattr(os, "waitid"):  # not in older Pythons on macOS
        os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)
    else:
        server.wait()
    ended.set()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(server.pid, signal.SIGKILL)  # the process that rewrites, if there is one
    return server.wait()


def _open(lock: Path) -> int:
    return os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)


def _start_server(folder: Path, binary: str, server_lock: int) -> subprocess.Popen[bytes]:
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def end_with_guardian() -> None:
        # Of this process alone, until it ends: the processes that it forks have no part in it.
        fcntl.lockf(server_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

    with (folder / "redis.log").open("ab") as log:
        return subprocess.Popen(  # noqa: S603 - the program that the starter chose
            [binary, str(folder / "redis.conf")],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[server_lock],  # closing it would end the lock
            process_group=0,
            preexec_fn=end_with_guardian,  # noqa: PLW1509 - there is one thread yet
        )


def _end_when_unused(folder: Path, server: int, ended: threading.Event) -> None:
    users = _open(folder / "users.lock")
    patience = _REWRITE_SECONDS
    while True:
        fcntl.flock(users, fcntl.LOCK_EX)
        if patience <= 0 or not any(folder.glob("temp-rewriteaof-*")):
            break
        fcntl.flock(users, fcntl.LOCK_UN)  # new users may join meanwhile
        time.sleep(_PAUSE_SECONDS)
        patience -= _PAUSE_SECONDS
    if not ended.is_set():
        os.kill(server, signal.SIGTERM)
    if not ended.wait(_ENDING_SECONDS):
        os.kill(server, signal.SIGKILL)


def _raise_open_files_limit() -> None:
    """Let the server hold its 10,000 connections where the hard limit allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 10_240 if hard == resource.RLIM_INFINITY else min(hard, 10_240)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


if __name__ == "__main__":
    sys.exit(guard(Path(sys.argv[1]), sys.argv[2]))
