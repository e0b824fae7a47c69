"""`python -m stepfleet.worker.testing`."""

import argparse
import asyncio
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import orjson

from stepfleet.worker.engine.loop_thread import new_event_loop
from stepfleet.worker.testing.rate_limits import RateLimit
from stepfleet.worker.testing.rules import RulesNotFoundError, load_rules
from stepfleet.worker.testing.scenario import TRANSIENT, FaultKind, Faults, Latency
from stepfleet.worker.testing.server import ModelServer
from stepfleet.worker.testing.service import RequestLog

USAGE_ERROR = 2
_LIMITS = {
    "rpm": ("requests", "requests per minute"),
    "tpm": ("tokens", "tokens per minute, those of prompts and answers"),
    "input-tpm": ("input_tokens", "tokens of prompts per minute"),
    "output-tpm": ("output_tokens", "tokens of answers per minute"),
    "in-flight": ("in_flight", "requests at once"),
}
_POLL_SECONDS = 0.25


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until a signal; return the exit code (2 for a wrong set-up)."""
    options = parser().parse_args(arguments)
    try:
        server = make_server(options)
    except (RulesNotFoundError, OSError, ValueError) as error:
        return _wrong(error)
    _raise_open_files_limit()
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        try:
            runner.run(_serve(server, options))
        except OSError as error:
            return _wrong(error)
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of the program's arguments."""
    made = argparse.ArgumentParser(
        prog="python -m stepfleet.worker.testing",
        description="An OpenAI-compatible model service that follows rules; for tests and trials.",
    )
    add = made.add_argument
    add("--rules", required=True, help="module:attribute or file.py:attribute")
    add("--host", default="127.0.0.1", help="address to listen on (default: loopback only)")
    add("--port", type=int, help="default: a free one below 32768")
    add("--latency", default="0", help="seconds: 0.05, 0.2-1.5 (evenly), 1.0~0.5 (log-normal)")
    add("--faults", type=float, default=0.0, help="share of failing requests, 0 to 1")
    add(
        "--fault-kinds",
        default=",".join(TRANSIENT),
        help=f"kinds, each with an optional weight: reset=3,hang; of {', '.join(FaultKind)}",
    )
    add("--first-attempts", type=int, help="only the first N attempts of a turn may fail")
    add("--context-window", type=int, help="tokens of the longest prompt (default: any)")
    for name, (_, text) in _LIMITS.items():
        add(f"--{name}", type=float, help=f"{text}, for each model and key")
    add("--burst", type=float, default=2.0, help="seconds of a limit that come at once (default 2)")
    add("--retry-after", type=float, help="seconds in the Retry-After of 429 answers")
    add("--seed", type=int, default=0, help="of faults and latency (default 0)")
    add("--log", type=Path, help="JSONL file to append one line per request to")
    add("--parent-pid", type=int, help="end when this process is gone")
    add("--stdin", action="store_true", help="end when standard input ends")
    return made


def make_server(options: argparse.Namespace) -> ModelServer:
    """Return the server that the arguments describe, not yet started.

    Raises `RulesNotFoundError`, `ValueError`, and `OSError` where the log cannot be opened.
    """
    faults = Faults(
        rate=options.faults,
        kinds=_weights(options.fault_kinds),
        seed=options.seed,
        first_attempts=options.first_attempts,
        retry_after=options.retry_after,
    )
    return ModelServer(
        load_rules(options.rules),
        faults=faults,
        latency=Latency.parse(options.latency),
        limits=_limit(options),
        context_window=options.context_window,
        log=RequestLog(keep=0, path=options.log),
        host=options.host,
        port=options.port,
    )


async def _serve(server: ModelServer, options: argparse.Namespace) -> None:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    if options.parent_pid is not None:
        _when_gone(options.parent_pid, loop, ended.set)
    if options.stdin:
        _when_input_ends(loop, ended.set)
    await server.start()
    try:
        line = orjson.dumps({"url": server.url, "pid": os.getpid()})
        sys.stdout.write(line.decode() + "\n")
        sys.stdout.flush()
        await ended.wait()
    finally:
        await server.stop()


def _limit(options: argparse.Namespace) -> RateLimit | None:
    given = {
        field: getattr(options, name.replace("-", "_")) for name, (field, _) in _LIMITS.items()
    }
    if not any(value is not None for value in given.values()):
        return None
    if given["in_flight"] is not None:
        given["in_flight"] = int(given["in_flight"])
    return RateLimit(**given, burst=options.burst)


def _weights(text: str) -> dict[FaultKind | str, float]:
    weights: dict[FaultKind | str, float] = {}
    for part in filter(None, text.split(",")):
        kind, _, weight = part.partition("=")
        weights[kind.strip()] = float(weight or 1)
    return weights


def _wrong(error: Exception) -> int:
    sys.stderr.write(f"model server: {error}\n")
    return USAGE_ERROR


def _raise_open_files_limit() -> None:
    """Allow as many open files, hence connections, as the system lets this process have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _when_gone(pid: int, loop: asyncio.AbstractEventLoop, then: Callable[[], None]) -> None:
    """Run `then` on the loop when the process `pid` is gone."""

    def watch() -> None:
        started_by = os.getppid()
        # A child sees its parent's end as a new parent: that also holds where the pid is reused
        # or the parent stays behind as a zombie.
        while _lives(pid) and (started_by != pid or os.getppid() == pid):
            time.sleep(_POLL_SECONDS)
        loop.call_soon_threadsafe(then)

    threading.Thread(target=watch, name="watch-parent", daemon=True).start()


def _when_input_ends(loop: asyncio.AbstractEventLoop, then: Callable[[], None]) -> None:
    """Run `then` on the loop when standard input ends."""

    def watch() -> None:
        # Straight from the descriptor: a reader blocked in sys.stdin keeps its lock, and the
        # interpreter needs that lock to end.
        while os.read(sys.stdin.fileno(), 4096):
            pass
        loop.call_soon_threadsafe(then)

    threading.Thread(target=watch, name="watch-input", daemon=True).start()


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


if __name__ == "__main__":
    raise SystemExit(main())
