"""Compares the working tree with a commit: cost per step, in pairs, and the ratios new over old.

python benchmarks/compare.py 5814fe2
python benchmarks/compare.py HEAD~1 --pairs 3 --runs 300
python benchmarks/compare.py 5814fe2 --instructions --pairs 1 --runs 100      # needs valgrind
python benchmarks/compare.py 5814fe2 --functions        # needs py-spy: pip install py-spy

Where the lock files differ, each side gets an environment from its own (by uv); else both have
that of this program. A side is driven by its command line alone, with a Redis, a worker and a model
server (stub.py) of its own: `stepfleet run` plays 20 runs for the worker's start, one of one step
for the command's own, which is taken off CPU and wall time, and then the measured runs. Redis's
figures include what the command asks for. At last it plays up to 300 runs with every call in
SLOWLOG, for the times of scripts: longer than without it, as it has commands inside scripts, too. A
script that first runs after the worker's start has its digest for a name.

CPU times of a shared machine differ by 20% from one to the next. With `--instructions` these are
counted instead (counting.py): two counts differ by a percent or two.
"""

import argparse
import contextlib
import hashlib
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import redis
from counting import Counted, counted_redis
from loads import LONGEST, WARM_RUNS, WARM_SECONDS, Followed, environment, followed
from monitor import Watch, watching
from processes import HERE, model, redis_server, workers
from readings import SECTIONS, Cost, Reading, peak_memory
from repeats import Spread, paired
from reports import WIDTH, begin, progress
from rich.console import Console
from rich.table import Table

ROOT = HERE.parent
ROOMS = ("orchestrator", "worker")
SLOTS, SCRIPT_RUNS = 1000, 300
LEASE = 300
"""Seconds: no worker is lost here, however slow valgrind and a busy machine make it."""
LEAST_SHARE = 2.0
"""Functions with less of the worker's samples on both sides are left out, in percent."""
Figures = dict[str, float]


@dataclass(frozen=True)
class Side:
    """A tree to measure: its interpreter, and the folder that holds its package `stepfleet`."""

    name: str
    tree: Path
    python: str
    package: Path


def program(name: str, remedy: str) -> str:
    """Return the path of a program. Exits with the remedy where there is none."""
    places = (None, Path(sys.executable).parent, ROOT / ".venv-check-uv" / "bin")
    found = next(filter(None, (shutil.which(name, path=place) for place in places)), None)
    return found or sys.exit(f"compare.py: {name} is missing: {remedy}")


def git(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run git in this tree."""
    command = [program("git", "install it"), "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@contextlib.contextmanager
def sides(commit: str) -> Iterator[list[Side]]:
    """Yield the commit's side and this tree's, compiled; exit where one cannot be made."""
    if git("rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}").returncode:
        sys.exit(f"compare.py: no commit {commit} here: run it in a git clone whose history has it")
    with tempfile.TemporaryDirectory(prefix="sf-compare-") as name:
        tree, made = Path(name) / "tree", []
        try:
            if (added := git("worktree", "add", "--detach", str(tree), commit)).returncode:
                sys.exit(f"compare.py: git worktree add: {added.stderr.strip()}")
            same = (tree / "uv.lock").read_bytes() == (ROOT / "uv.lock").read_bytes()
            for label, at in (("old", tree), ("new", ROOT)):
                place = Path(name) / label
                python = sys.executable if same else environment_of(at, place / "environment")
                rooms = [str(at / room) for room in ROOMS]
                subprocess.run([python, "-m", "compileall", "-qq", *rooms], check=False)
                made.append(Side(label, at, python, package_of(at, place / "package")))
            yield made
        finally:
            git("worktree", "remove", "--force", str(tree))


def environment_of(tree: Path, place: Path) -> str:
    """Make a worker's environment from the tree's lock file; return its interpreter."""
    uv = program("uv", "the lock files differ; pip install uv")
    options = ("--frozen", "--no-default-groups", "--no-install-project", "--compile-bytecode")
    command = [uv, "sync", "--quiet", *options, "--extra", "worker", "--python", sys.executable]
    variables = {**os.environ, "UV_PROJECT_ENVIRONMENT": str(place)}
    if subprocess.run(command, cwd=tree, env=variables, check=False).returncode:
        sys.exit("compare.py: uv could not install the packages of a lock file (see above)")
    return str(place / "bin" / "python")


def package_of(tree: Path, place: Path) -> Path:
    """Return the folder that holds the tree's `stepfleet`; made where older trees have none."""
    if (known := tree / "deploy" / "package").is_dir():
        return known
    (place / "stepfleet").mkdir(parents=True)
    for room in ROOMS:
        (place / "stepfleet" / room).symlink_to(tree / room)
    return place


@dataclass(frozen=True)
class Fleet:
    """A side's running fleet, warm. `play` plays runs by the command line."""

    play: Callable[..., Followed]
    folder: Path
    store: redis.Redis
    watch: Watch
    worker: int
    redis: int
    model: int


@contextlib.contextmanager
def fleet(
    args: argparse.Namespace, side: Side, before: Sequence[str] = (), within: float = WARM_SECONDS
) -> Iterator[Fleet]:
    """Run a side's fleet, warm in time; `before` goes in front of its worker's interpreter."""
    with (
        tempfile.TemporaryDirectory(prefix="sf-bench-") as name,
        redis_server() as (url, server),
        model(str(args.latency), stub=True) as served,
        redis.Redis.from_url(url) as store,
        contextlib.ExitStack() as running,
    ):
        variables = {
            **environment(url, served.url, SLOTS),
            "STEPFLEET_AGENTS": str(HERE / "compare_agent.py"),
            "PYTHONPATH": str(side.package),
            "STEPFLEET_LEASE": str(LEASE),
        }
        play = partial(followed, variables=variables, folder=Path(name), python=(side.python,))
        with watching(url) as watch:
            begun = workers(1, variables, python=(*before, side.python))
            (worker,) = running.enter_context(begun)
            play(WARM_RUNS, args.steps, within=within)
        yield Fleet(play, Path(name), store, watch, worker, server, served.pid)


def measure(args: argparse.Namespace, side: Side) -> Figures:
    """Return the figures of one side."""
    with fleet(args, side) as on:
        start = on.play(1, 1)
        before = Reading.now([on.store.info(*SECTIONS)], [on.worker], [on.model])
        used = on.play(args.runs, args.steps)
        after = Reading.now([on.store.info(*SECTIONS)], [on.worker], [on.model])
        cost = Cost.between(before, after, args.runs * args.steps)
        ideal = args.latency * args.steps * math.ceil(args.runs / SLOTS)
        wall = used.wall - start.wall + args.latency
        found = {
            "worker's start, CPU s": before.worker_cpu,
            "command's start, CPU s": start.cpu,
            "worker, CPU ms per step": cost.worker_ms,
            "Redis, CPU ms per step": cost.redis_ms,
            "command, CPU ms per row": (used.cpu - start.cpu) * 1000 / args.runs,
            **({"wall over ideal": wall / ideal} if ideal else {"wall s": wall}),
            "worker, max RSS MB": peak_memory(on.worker) / 1e6,
            "Redis commands per step": cost.commands,
            "scripts per step": cost.scripts,
        }
        on.store.config_set("slowlog-max-len", 1_000_000)
        on.store.config_set("slowlog-log-slower-than", 0)
        runs = min(args.runs, SCRIPT_RUNS)
        on.play(runs, args.steps)
        return found | scripts(on.store, script_names(side.tree, on.watch), runs * args.steps)


def count(args: argparse.Namespace, side: Side) -> Figures:
    """Return the instructions of one side in user space, in thousands."""
    with tempfile.TemporaryDirectory(prefix="sf-count-") as name:
        folder = Path(name)
        worker, command = Counted(folder / "worker"), Counted(folder / "command")
        with counted_redis(folder) as server, fleet(args, side, worker.before, LONGEST) as on:
            commands = partial(on.play, python=(*command.before, side.python))
            commands(1, 1)
            start = command.in_all()
            worker.since(on.worker)
            server.since(on.redis)
            commands(args.runs, args.steps)
            steps = args.runs * args.steps * 1000
            return {
                "worker, k instructions per step": worker.since(on.worker) / steps,
                "Redis, k instructions per step": server.since(on.redis) / steps,
                "command, k instructions per row": (command.in_all() - start) / args.runs / 1000,
                "command's start, k instructions": start / 1000,
            }


def sample(args: argparse.Namespace, side: Side, spy: str) -> Figures:
    """Return the functions of a side's worker."""
    with fleet(args, side) as on:
        load = partial(on.play, args.runs, args.steps)
        return functions_of(spy, on.worker, on.folder / "profile", load)


def scripts(store: redis.Redis, names: Mapping[str, str], steps: int) -> Figures:
    """Return what SLOWLOG has of scripts, per step."""
    found: Counter[str] = Counter()
    for one in store.slowlog_get(1_000_000):
        words = one["command"][:60].decode(errors="replace").split(" ")
        if (command := words[0].upper()) in {"EVALSHA", "EVAL"}:
            name = names.get(words[1], words[1][:8]) if command == "EVALSHA" else "sent whole"
            found[f"script {name}, us/step"] += one["duration"]
            found[f"script {name}, calls/step"] += 1
    return {name: total / steps for name, total in sorted(found.items(), reverse=True)}


def script_names(tree: Path, watch: Watch) -> dict[str, str]:
    """Return the names of the scripts that were loaded, by digest: of the files they end as."""
    files = {
        file.stem: file.read_bytes() for room in ROOMS for file in (tree / room).rglob("*.lua")
    }
    found = {}
    for one in watch.seen:
        if one.name in {"script", "eval"}:
            text = one.words[2 if one.name == "script" else 1]
            script = text.encode().decode("unicode_escape").encode("latin-1")
            flags = " (allow-oom)" if script.startswith(b"#!lua flags=allow-oom") else ""
            name = max(files, key=lambda stem: _shared_end(script, files[stem])) + flags
            found[hashlib.sha1(script, usedforsecurity=False).hexdigest()] = name
    return found


def _shared_end(script: bytes, text: bytes) -> int:
    """Return how many bytes both end with: what a script seldom needs may be in other places."""
    pairs = zip(reversed(script), reversed(text), strict=False)
    shorter = min(len(script), len(text))
    return next((number for number, (one, other) in enumerate(pairs) if one != other), shorter)


def functions_of(spy: str, pid: int, file: Path, load: Callable[[], object]) -> Figures:
    """Sample a process during a load; return each function's own share of the samples in %."""
    options = ("--gil", "--function", "--rate", "200", "--format", "raw", "--output", str(file))
    command = [spy, "record", "--pid", str(pid), *options]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            load()
        finally:
            process.send_signal(signal.SIGINT)
    if not file.exists():
        sys.exit("compare.py: py-spy could not watch the worker: it may need root (see above)")
    samples: Counter[str] = Counter()
    for line in file.read_text(encoding="utf-8").splitlines():
        stack, _, count = line.rpartition(" ")
        name = stack.rpartition(";")[2] or "(no Python frame)"
        samples[re.sub(r":\d+\)$", ")", name)] += int(count)
    return {name: 100 * own / samples.total() for name, own in samples.most_common()}


def show(title: str, found: Mapping[str, Sequence[Figures]], least: float = -math.inf) -> None:
    """Print medians of both sides, and ratios of pairs; only rows that reach `least` somewhere."""
    table = Table("")
    for heading in ("old", "new", "new / old", "lowest", "highest"):
        table.add_column(heading, justify="right")
    for name in dict.fromkeys(name for side in found.values() for one in side for name in one):
        old, new = ([one.get(name, 0.0) for one in found[side]] for side in ("old", "new"))
        if max(*old, *new) >= least:
            ratio = paired(new, old)
            shown = (ratio.median, ratio.low, ratio.high) if ratio else ()
            figures = (figure(Spread.of(old)), figure(Spread.of(new)))
            table.add_row(name, *figures, *(f"{one:.2f}" for one in shown))
    Console(width=WIDTH, highlight=False).print(f"\n{title}", table)


def figure(spread: Spread) -> str:
    """Return three digits of a median, with its spread; a dash for nothing."""
    known = abs(spread.median)
    return spread.shown(max(0, 2 - math.floor(math.log10(known)))) if known else "-"


def main() -> None:
    """Measure, print, and write the file."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("commit", help="compare with this one")
    made.add_argument("--pairs", type=int, default=5)
    made.add_argument("--runs", type=int, default=1000)
    made.add_argument("--steps", type=int, default=4, help="model calls of each run")
    made.add_argument("--latency", type=float, default=1.0, help="seconds of a model call")
    made.add_argument("--instructions", action="store_true", help="count these, instead of time")
    made.add_argument("--functions", action="store_true", help="where the worker's CPU goes")
    made.add_argument("--json", metavar="FILE", help="write every measurement here")
    args = made.parse_args()
    spy = program("py-spy", "pip install py-spy") if args.functions else None
    if args.instructions:
        program("valgrind", "apt-get install valgrind")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each start would compile all packages anew
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with sides(args.commit) as both:
        report = begin("compare", args)
        found: dict[str, list[Figures]] = {"old": [], "new": []}
        for pair in range(args.pairs):
            for side in both if pair % 2 == 0 else reversed(both):
                found[side.name].append((count if args.instructions else measure)(args, side))
                report.rows.append({"side": side.name, "pair": pair, **found[side.name][-1]})
                progress.print(f"pair {pair + 1} of {args.pairs}: {side.name}")
        report.write(args.json)
        load = f"{args.runs} runs x {args.steps} steps, {args.latency:g} s per model call"
        show(f"{args.pairs} pairs of {load}; old is {args.commit}", found)
        if spy:
            shares = {side.name: [sample(args, side, spy)] for side in both}
            show("Functions of the worker, their own % of its samples", shares, LEAST_SHARE)


if __name__ == "__main__":
    main()
