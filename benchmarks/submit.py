"""Runs submitted per second and the client's memory: the library, the CLI, and the bare floor.

python benchmarks/submit.py                         # 1k, 10k and 100k lines
python benchmarks/submit.py --lines 1000 5000 --repeat 3

No worker runs. `library` is Fleet.submit_batch of a JSONL file, timed inside its process; `cli` is
`stepfleet submit`, its start included. `floor` sends the very bytes that create the same runs, 500
script calls per write, over one plain socket, made and packed beforehand. Memory is the process's
peak (megabytes), and grows with the number of lines only if the client holds them.
"""

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import hiredis
import orjson
import redis
from create_calls import create_calls, script
from loads import lines
from plots import Line, Plot
from processes import HERE, redis_server
from repeats import Spread, paired
from reports import Column, Report, begin, finish, grouped, parser, show, values

KEY = ("what", "lines")
AT_ONCE = 500
READ_BYTES = 1 << 20
LOOK_SECONDS = 0.01


def arguments() -> argparse.Namespace:
    """Return the parsed arguments."""
    made = parser(__doc__)
    made.add_argument("--lines", type=int, nargs="*", default=[1000, 10_000, 100_000])
    made.add_argument("--steps", type=int, default=5, help="named in the input, never done")
    return made.parse_args()


def row(what: str, count: int, seconds: float, cpu: float, peak: float | None) -> dict[str, Any]:
    """Return a measurement as a row; `cpu_us` is the client's CPU per run in microseconds."""
    return {
        "what": what,
        "lines": count,
        "seconds": seconds,
        "rate": count / seconds,
        "cpu_us": cpu / count * 1e6,
        "megabytes": peak,
    }


def library(count: int, steps: int) -> dict[str, Any]:
    """Measure `Fleet.submit_batch` in a process of its own."""
    with redis_server() as (url, _), inputs(count, steps) as path:
        printed, _, _, peak = _run([sys.executable, str(HERE / "submitter.py"), path], url)
        return row("library", count, printed["seconds"], printed["cpu"], peak)


def command_line(count: int, steps: int) -> dict[str, Any]:
    """Measure `stepfleet submit` from its start to its end."""
    with redis_server() as (url, _), inputs(count, steps) as path:
        command = [sys.executable, "-m", "stepfleet.orchestrator.cli", "submit", path]
        command += ["--agents", str(HERE / "agents.py"), "--agent", "runner", "--json"]
        _, seconds, cpu, peak = _run(command, url)
        return row("cli", count, seconds, cpu, peak)


def floor(count: int, steps: int) -> dict[str, Any]:
    """Measure the same script calls over a plain socket."""
    with redis_server() as (url, _), redis.Redis.from_url(url) as client:
        client.script_load(script())
        calls = create_calls(lines(count, steps), url)
        chunks = [calls[start : start + AT_ONCE] for start in range(0, count, AT_ONCE)]
        packed = [(b"".join(chunk), len(chunk)) for chunk in chunks]
        with _connected(url) as connection:
            started, cpu = time.monotonic(), time.process_time()
            for sent, replies in packed:
                connection.sendall(sent)
                _read(connection, replies)
            seconds, used = time.monotonic() - started, time.process_time() - cpu
    return row("floor", count, seconds, used, None)


@contextlib.contextmanager
def _connected(url: str) -> Iterator[socket.socket]:
    """Give an authenticated plain socket to the server."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname or "127.0.0.1", parts.port or 6379)) as made:
        if parts.password:
            who = (parts.username, parts.password) if parts.username else (parts.password,)
            made.sendall(hiredis.pack_command(("AUTH", *who)))
            _read(made, 1)
        yield made


def _read(connection: socket.socket, count: int) -> None:
    """Read so many replies. Raises `redis.ResponseError` for one that is an error."""
    reader = hiredis.Reader()
    while count:
        reply = reader.gets()
        if reply is False:
            reader.feed(connection.recv(READ_BYTES))
        elif isinstance(reply, Exception):
            raise redis.ResponseError(str(reply))
        else:
            count -= 1


@contextlib.contextmanager
def inputs(count: int, steps: int) -> Iterator[str]:
    """Give the path of a file with that many lines, gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="sf-bench-") as folder:
        path = Path(folder) / "lines.jsonl"
        with path.open("wb") as file:
            file.writelines(orjson.dumps(line) + b"\n" for line in lines(count, steps))
        yield str(path)


def _run(command: list[str], url: str) -> tuple[dict[str, Any], float, float, float]:
    """Run a client; return what it printed, seconds, CPU seconds and peak memory (megabytes)."""
    environment = {**os.environ, "STEPFLEET_REDIS_URL": url}
    started = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, env=environment, cwd=HERE, stdout=output, text=True)
        peak = 0.0
        while True:
            time.sleep(LOOK_SECONDS)
            peak = _peak_megabytes(process.pid) or peak
            ended, status, used = os.wait4(process.pid, os.WNOHANG)
            if ended:
                break
        seconds = time.monotonic() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        text = output.read()
    if process.returncode:
        raise RuntimeError(f"{command} ended with {process.returncode}")
    return json.loads(text), seconds, used.ru_utime + used.ru_stime, peak


def _peak_megabytes(pid: int) -> float:
    """Return the peak so far, 0 where it is not known (any more).

    The usage that a wait reports is no good on Linux: a started process begins with the peak of
    the one that started it.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0.0
    found = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(found[0]) * 1024 / 1e6 if found else 0.0


def print_table(report: Report) -> None:
    """Print what was measured."""
    show(
        "Submission: lines of a JSONL file that became runs",
        report.rows,
        KEY,
        [
            Column("what", "what"),
            Column("lines", "lines"),
            Column("runs/s", "rate", 0, spread=True),
            Column("seconds", "seconds", 2, spread=True),
            Column("client CPU us/run", "cpu_us", 0),
            Column("peak MB", "megabytes", 0),
        ],
    )


def ratios(report: Report) -> dict[str, Spread]:
    """Return the rates over the floor's, in pairs of the same repetition."""
    groups = grouped(report.rows, KEY)
    found = {}
    for (what, count), rows in groups.items():
        beside = groups.get(("floor", count), [])
        ratio = paired(values(rows, "rate"), values(beside, "rate"))
        if what != "floor" and ratio:
            found[f"runs/s, {what} over the floor's, {count} lines"] = ratio
    return found


def plots(report: Report) -> list[Plot]:
    """Return the rate and the peak memory against the number of lines."""
    drawn = []
    for name, unit in (("rate", "runs per second"), ("megabytes", "peak MB")):
        found = []
        for (what,), rows in grouped(report.rows, ("what",)).items():
            points = []
            for (count,), group in sorted(grouped(rows, ("lines",)).items()):
                if known := values(group, name):
                    spread = Spread.of(known)
                    points.append((count, spread.median, spread.low, spread.high))
            if points:
                found.append(Line(what, points))
        drawn.append(Plot(unit, "lines", unit, found, logarithmic=True))
    return drawn


def main() -> None:
    """Measure, print, and write the files."""
    args = arguments()
    report = begin("submit", args)
    for _ in range(args.repeat):
        for count in args.lines:
            for measure in (floor, library, command_line):
                report.add(measure(count, args.steps))
    report.ratios.update(ratios(report))
    print_table(report)
    finish(report, args, lambda: plots(report))


if __name__ == "__main__":
    main()
