"""How long a worker takes from its process's start to being ready, and to its first claim.

python benchmarks/startup.py --repeat 5

Beside a stock Celery worker (`-P solo`, one no-op task). Work waits in the queue before the start.
Seconds since the process was started: `ready` is Celery's own log line, `first_claim` the first
claim (or task taken from the queue) that Redis sees (MONITOR), `first_done` the first commit, or
the no-op's result. Then where a worker's imports go, by `-X importtime` (its own cost included):
self time by distribution, and the slowest modules.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis
from agents import runner
from loads import Setup, environment, lines, servers
from monitor import Seen, watching
from plots import Line, Plot
from processes import HERE, ended, redis_server, until, worker_command
from repeats import Spread, paired
from reports import Column, Report, begin, finish, parser, show, values

from stepfleet import Fleet
from stepfleet.orchestrator.store.lua import digest

MOMENTS = ("ready", "first_claim", "first_done")
READY = re.compile(r"\bready\.")
IMPORTED = re.compile(r"import time:\s+(\d+) \|\s+(\d+) \| (\s*)(\S+)")
LOAD_WORKER = "import celery.bin.worker; from stepfleet.worker.app import app; app.finalize()"
LOAD_CELERY = "import celery.__main__, celery.bin.celery, celery.apps.worker; from chain import app"


def arguments() -> argparse.Namespace:
    """Return the parsed arguments."""
    made = parser(__doc__)
    made.add_argument("--top", type=int, default=15, help="modules in the import list")
    return made.parse_args()


def stepfleet() -> dict[str, Any]:
    """Measure a Stepfleet worker."""
    with servers(Setup()) as (url, served), Fleet(url) as fleet:
        batch = fleet.submit_batch(lines(1, 1), agent=runner)
        known = environment(url, served.url, 1000)
        claim, commit = digest("claim"), digest("commit")
        return started(
            ("stepfleet", "stepfleet.worker.app", url, known),
            lambda: batch.progress().done,
            lambda one: one.name == "evalsha" and claim in one.words,
            lambda one: one.name == "evalsha" and commit in one.words,
        )


def celery() -> dict[str, Any]:
    """Measure a stock worker with the bare chain's task."""
    with redis_server() as (url, _), redis.Redis.from_url(url) as client:
        os.environ["BENCH_BROKER"] = url
        send = "from chain import step; step.delay(0, 0)"
        subprocess.run([sys.executable, "-c", send], cwd=HERE, check=True)
        return started(
            ("celery", "chain:app", url, {"BENCH_BROKER": url}),
            lambda: client.get("chain-done"),
            lambda one: one.name == "brpop",
            lambda one: one.name in {"incr", "incrby"} and "chain-done" in one.words,
            "-P",
            "solo",
        )


def started(
    what: tuple[str, str, str, Any],
    is_done: Callable[[], object],
    is_claim: Callable[[Seen], bool],
    is_commit: Callable[[Seen], bool],
    *options: str,
) -> dict[str, Any]:
    """Start a worker, wait for its first work's end, and return the moments as a row."""
    name, app, url, known = what
    with watching(url) as watch:
        epoch, begun = time.time(), time.monotonic()
        process = subprocess.Popen(
            [*worker_command(app, "start", *options), "-l", "info"],
            env={**os.environ, **known},
            cwd=HERE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        with ended(process):
            ready: list[float] = []
            threading.Thread(target=_read, args=(process, begun, ready), daemon=True).start()
            until(lambda: is_done() and ready)
    seen = [one for one in watch.seen if one.at >= epoch]
    return {
        "what": name,
        "ready": ready[0],
        "first_claim": next((one.at - epoch for one in seen if is_claim(one)), None),
        "first_done": next((one.at - epoch for one in seen if is_commit(one)), None),
    }


def _read(process: "subprocess.Popen[str]", begun: float, ready: list[float]) -> None:
    assert process.stdout is not None  # noqa: S101 - it is a pipe
    for line in process.stdout:
        if not ready and READY.search(line):
            ready.append(time.monotonic() - begun)


def imports(what: str, code: str) -> list[dict[str, Any]]:
    """Return the modules that `code` imports, with self and cumulative seconds."""
    with tempfile.TemporaryDirectory(prefix="sf-bench-") as folder:
        Path(folder, "stepfleet.toml").write_text("")
        known = {
            **os.environ,
            "BENCH_BROKER": "redis://localhost",
            "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
            **environment("redis://localhost", "http://localhost/v1", 1000),
        }
        done = subprocess.run(
            [sys.executable, "-X", "importtime", "-c", code],
            env=known,
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        )
    return [
        {
            "what": what,
            "module": match.group(4),
            "self": int(match.group(1)) / 1e6,
            "cumulative": int(match.group(2)) / 1e6,
            "depth": len(match.group(3)) // 2,
        }
        for match in IMPORTED.finditer(done.stderr)
    ]


def by_package(modules: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the self time (seconds) of each top-level package, the largest first."""
    total: Counter[str] = Counter()
    for one in modules:
        total[one["module"].partition(".")[0]] += one["self"]
    what = modules[0]["what"]
    return [{"what": what, "package": name, "self": took} for name, took in total.most_common()]


def print_imports(what: str, modules: list[dict[str, Any]], top: int) -> None:
    """Print where the imports' time goes."""
    columns = [Column("package", "package"), Column("self s", "self", 3)]
    whole = sum(one["self"] for one in modules)
    title = f"{what}: imports take {whole:.2f} s in all; by package"
    show(title, by_package(modules)[:top], ("package",), columns)
    slowest = sorted(modules, key=lambda one: -one["cumulative"])[:top]
    columns = [Column("module", "module"), Column("self s", "self", 3)]
    columns.append(Column("with what it imports", "cumulative", 3))
    show(f"{what}: the slowest modules", slowest, ("module",), columns)


def main() -> None:
    """Measure, print, and write the files."""
    args = arguments()
    report = begin("startup", args)
    for _ in range(args.repeat):
        for measure in (celery, stepfleet):
            report.add(measure())
    show(
        "Seconds from the process's start",
        report.rows,
        ("what",),
        [
            Column("what", "what"),
            Column("ready", "ready", 2, spread=True),
            Column("first claim", "first_claim", 2, spread=True),
            Column("first done", "first_done", 2, spread=True),
        ],
    )
    for what, code in (("celery", LOAD_CELERY), ("stepfleet", LOAD_WORKER)):
        modules = imports(what, code)
        print_imports(what, modules, args.top)
        packages = {one["package"]: one["self"] for one in by_package(modules)}
        report.details[what] = {"import_seconds": sum(packages.values()), "packages": packages}
    for moment in MOMENTS:
        times = (values(_of(report, name), moment) for name in ("stepfleet", "celery"))
        if ratio := paired(*times):
            report.ratios[f"{moment}, stepfleet over celery"] = ratio
    finish(report, args, lambda: [plot(report)])


def plot(report: Report) -> Plot:
    """Return the moments of both."""
    found = []
    for what in ("celery", "stepfleet"):
        points = []
        for place, moment in enumerate(MOMENTS, start=1):
            spread = Spread.of(values(_of(report, what), moment))
            points.append((place, spread.median, spread.low, spread.high))
        found.append(Line(what, points))
    return Plot("start of a worker", "1 ready, 2 first claim, 3 first done", "seconds", found)


def _of(report: Report, what: str) -> list[dict[str, Any]]:
    return [one for one in report.rows if one["what"] == what]


if __name__ == "__main__":
    main()
