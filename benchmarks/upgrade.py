"""A rolling upgrade of a loaded fleet from a commit to this tree, and the rollback to it.

python benchmarks/upgrade.py 63c89e0c                               # 200 runs, 4 workers, 1 killed
python benchmarks/upgrade.py 63c89e0c --runs 1000 --workers 10 --kills 3

Needs a git clone whose history has the commit. In each direction, on a Redis of its own: all
workers are of one version; each in turn is stopped by SIGTERM (the first ones by SIGKILL) while it
has runs, and replaced by one of the other version. Before each, clients of both versions in turn
submit a share of the runs. Both read all results. The model (stub.py) counts calls, the runs' tool
its effects.

`repeated`: calls made again for the same turn; not more than `in hand`, the runs that killed
workers had. `twice`: effects of one call above one; none is right. `drain`: the longest time from
SIGTERM to the end, in seconds.
Exits with 1 where a run did not complete, results differ, or one of the two is wrong.
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis
from compare import Side, sides
from crew import calls_of, drained, effects_of, held, repeated
from loads import LONGEST, Setup, environment, lines, servers
from processes import HERE, LOG_TAIL, ended, until, worker_command
from reports import Column, begin, finish, parser, progress, show

from stepfleet import Batch, Fleet
from stepfleet.orchestrator.store.batches.batches import run_id_of

START_SECONDS = 180.0
COLUMNS = (
    *(Column("direction", "direction"), Column("runs", "runs", 0), Column("done", "completed", 0)),
    *(Column("repeated", "repeated", 0), Column("in hand", "in_hand", 0)),
    *(Column("twice", "twice", 0), Column("effects", "effects", 0)),
    *(Column("drain, s", "drain", 1), Column("all, s", "seconds", 1), Column("right", "right")),
)


@dataclass
class Rollout:
    """A fleet that goes from one side to another. `batches` are ids, in the order of their rows."""

    args: argparse.Namespace
    variables: Mapping[str, str]
    folder: Path
    store: redis.Redis
    client: Fleet
    running: contextlib.ExitStack
    workers: "dict[str, subprocess.Popen[str]]" = field(default_factory=dict)
    """By the names of their nodes, under which they hold runs; the oldest first."""
    batches: list[Batch] = field(default_factory=list)
    drains: list[float] = field(default_factory=list)
    in_hand: int = 0

    def start(self, side: Side) -> None:
        """Start a worker of a side."""
        name = f"{side.name}{time.monotonic_ns()}"
        with (self.folder / f"{name}.log").open("w") as log:
            process = subprocess.Popen(
                [side.python, *worker_command("stepfleet.worker.app", name)[1:]],
                env={**os.environ, **self.variables, "PYTHONPATH": str(side.package)},
                cwd=HERE,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
            )
        node = f"{name}@{socket.gethostname()}"
        self.workers[node] = self.running.enter_context(ended(process))

    def ready(self) -> None:
        """Wait until the fleet sees all workers, alive or, on a busy machine, silent for now."""
        until(lambda: self.workers.keys() <= self._seen(), within=START_SECONDS)

    def _seen(self) -> set[str]:
        return {one.name for one in self.client.overview().workers}

    def holds(self, worker: str) -> int:
        """Return how many runs a worker has in hand."""
        runs = [run_id_of(one.id, n) for one in self.batches for n in range(self.args.runs)]
        return len(held(self.store, runs).get(worker, []))

    def command(self, side: Side, *arguments: str) -> str:
        """Return what a side's command prints. Raises `RuntimeError` where it fails."""
        done = subprocess.run(
            [side.python, "-m", "stepfleet.orchestrator.cli", *arguments],
            env={**os.environ, **self.variables, "PYTHONPATH": str(side.package)},
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            told = (done.stdout + done.stderr)[-LOG_TAIL:]
            raise RuntimeError(f"{side.name}: stepfleet {arguments[0]}: {told}")
        return done.stdout

    def submit(self, side: Side, runs: int) -> None:
        """Submit runs by a side's command."""
        file = self.folder / f"{side.name}-{len(self.batches)}.jsonl"
        given = lines(runs, self.args.steps)
        file.write_text("".join(json.dumps(one) + "\n" for one in given))
        agents = ("--agents", self.variables["STEPFLEET_AGENTS"], "--agent", "mover")
        printed = self.command(side, "submit", str(file), *agents)
        self.batches.append(self.client.batches.get(printed.split()[-1]))

    def replace(self, side: Side, *, kill: bool) -> None:
        """Stop or kill the oldest worker, and start one of the side instead."""
        name = next(iter(self.workers))
        worker = self.workers.pop(name)
        until(lambda: self.holds(name), within=START_SECONDS)
        if kill:
            worker.kill()
            worker.wait()
            self.in_hand += self.holds(name)
        else:
            self.drains.append(drained(worker))
        self.start(side)
        self.ready()

    def done(self) -> int:
        """Return how many runs have ended."""
        return sum(one.progress().done for one in self.batches)


def roll(args: argparse.Namespace, old: Side, new: Side) -> dict[str, Any]:
    """Replace the workers of a loaded fleet; return what it came to."""
    with tempfile.TemporaryDirectory(prefix="sf-upgrade-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        (effects := folder / "effects").touch()
        # Fewer than a share of the runs needs: so every worker has some.
        slots = max(args.runs // (args.workers * (args.workers + 1)), 2)
        setup = Setup(latency=str(args.latency), log=folder / "calls.jsonl", stub=True)
        with servers(setup) as (url, served), contextlib.ExitStack() as running:
            variables = {
                **environment(url, served.url, slots),
                "STEPFLEET_AGENTS": str(HERE / "upgrade_agent.py"),
                "STEPFLEET_LEASE": str(args.lease),
                "EFFECTS": str(effects),
                "STEPFLEET_NO_CHECK": "1",  # it would call the model, whose calls are counted
            }
            fleet = stack.enter_context(Fleet(url))
            store = stack.enter_context(redis.Redis.from_url(url))
            on = Rollout(args, variables, folder, store, fleet, running)
            found = _played(on, old, new)
            stack.close()
        calls = calls_of(folder / "calls.jsonl")
        found |= {"repeated": repeated(calls), **effects_of(effects)}
    found["right"] = (
        found["completed"] == found["runs"]
        and found["same"]
        and found["repeated"] <= found["in_hand"]
        and not found["twice"]
    )
    return found


def _played(on: Rollout, old: Side, new: Side) -> dict[str, Any]:
    args, began = on.args, time.monotonic()
    for _ in range(args.workers):
        on.start(old)
    on.ready()
    for number in range(args.workers):
        done, following = (args.runs * n // args.workers for n in (number, number + 1))
        on.submit((old, new)[number % 2], following - done)
        on.replace(new, kill=number < args.kills)
        progress.print(f"replaced {number + 1}; {on.done()} runs have ended")
    progress.print(on.command(new, "workers"))
    until(lambda: on.done() == args.runs, within=LONGEST)
    results = [_results(on, side) for side in (old, new)]
    return {
        "direction": f"{old.name} to {new.name}",
        "runs": args.runs,
        "completed": sum(one.progress().completed for one in on.batches),
        "in_hand": on.in_hand,
        "drain": max(on.drains, default=0.0),
        "drains": on.drains,
        "seconds": time.monotonic() - began,
        "same": results[0] == results[1] and len(results[0]) == args.runs,
    }


def _results(on: Rollout, side: Side) -> Sequence[str]:
    """Return the results of all batches as a side reads them: sorted lines."""
    fields = ("--fields", "id,status,output")
    read = (on.command(side, "results", one.id, *fields) for one in on.batches)
    return sorted(line for text in read for line in text.splitlines())


def main() -> None:
    """Measure both directions."""
    options = parser(__doc__)
    options.add_argument("commit", help="the version before")
    options.add_argument("--runs", type=int, default=200)
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--latency", type=float, default=1.0, help="seconds of a model's answer")
    options.add_argument("--workers", type=int, default=4, help="all are replaced, one by one")
    options.add_argument("--kills", type=int, default=1, help="of them by SIGKILL, the first ones")
    options.add_argument("--lease", type=float, default=15.0)
    args = options.parse_args()
    report = begin("upgrade", args)
    with sides(args.commit) as (old, new):
        for _ in range(args.repeat):
            for pair in ((old, new), (new, old)):
                report.add(roll(args, *pair))
    show("Rolling upgrades", report.rows, ("direction",), COLUMNS)
    finish(report, args, list)
    sys.exit(0 if all(one["right"] for one in report.rows) else 1)


if __name__ == "__main__":
    main()
