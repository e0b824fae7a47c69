"""The latency that a step adds at low load, and the commands that workers send for it.

Few runs at once, with a model whose answers take 0.1 to 0.3 s, so that they do not fall into step.
Two sources, joined by run and step, all on one machine and so on one clock:

* the model server's request log: `received` when a request has come in whole, `answered` when its
  answer goes out (its own work between the two sides is part of every figure: an upper bound);
* MONITOR: when a commit's script pushed the next step's message, when a commit began. What Redis
  does for MONITOR is in the figures as well.

`turnaround`: an answer goes out -> the same run's next request has come in (everything between two
model calls: the answer's journal, the tool, decision, commit, queue, claim, request).
`pickup`: the next message is pushed -> the next request has come in.
`closing`: a run's last answer goes out -> its last commit begins in Redis.
"""

import json
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
from agents import runner
from bench_figures import percentile
from loads import LONGEST, Running, Setup, fleet, lines
from monitor import Seen, Watch, watching

from stepfleet.orchestrator.store.batches.batches import run_id_of
from stepfleet.orchestrator.store.lua import digest

LATENCY = "0.1-0.3"


@dataclass(frozen=True)
class Added:
    """Milliseconds (None where there was no such moment), and commands per step of workers.

    `commands` counts by name what worker processes sent, scripts by their own names; `inside` is
    what scripts called in turn.
    """

    runs: int
    steps: int
    turnaround_p50: float | None
    turnaround_p99: float | None
    pickup_p50: float | None
    pickup_p99: float | None
    closing_p50: float | None
    closing_p99: float | None
    client_commands: float
    inside: float
    commands: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Call:
    """One model call: run id, step (from 0), and epoch seconds."""

    run: str
    step: int
    received: float
    answered: float


def measure(runs: int, steps: int) -> Added:
    """Measure one worker at low load."""
    with tempfile.TemporaryDirectory(prefix="sf-bench-") as folder:
        log = Path(folder) / "requests.jsonl"
        with fleet(Setup(latency=LATENCY, log=log)) as running:
            running.warm()
            given = lines(runs, steps)
            with watching(running.url) as watch:
                batch = running.client.submit_batch(given, agent=runner)
                batch.wait(timeout=LONGEST)
            known = {one["input"]: run_id_of(batch.id, row) for row, one in enumerate(given)}
            addresses = _addresses(running)
            calls = _calls(log, known)
    return summed(calls, watch, addresses)


def summed(calls: list[Call], watch: Watch, addresses: set[str]) -> Added:
    """Return the figures. Pure."""
    seen = list(watch.seen)
    pushed = {one.hint: one.at for one in seen if one.inside and one.hint}
    committed = _commits(seen)
    by_run: defaultdict[str, list[Call]] = defaultdict(list)
    for call in sorted(calls, key=lambda one: (one.run, one.step)):
        by_run[call.run].append(call)
    turnaround, pickup, closing = [], [], []
    for run, made in by_run.items():
        for one, following in pairwise(made):
            turnaround.append(following.received - one.answered)
            if at := pushed.get((run, following.step)):
                pickup.append(following.received - at)
        if at := committed.get((run, made[-1].step)):
            closing.append(at - made[-1].answered)
    sent = Counter(_name(one) for one in seen if one.by in addresses)
    inside = sum(one.inside for one in seen)
    return Added(
        runs=len(by_run),
        steps=len(calls),
        turnaround_p50=_ms(turnaround, 0.5),
        turnaround_p99=_ms(turnaround, 0.99),
        pickup_p50=_ms(pickup, 0.5),
        pickup_p99=_ms(pickup, 0.99),
        closing_p50=_ms(closing, 0.5),
        closing_p99=_ms(closing, 0.99),
        client_commands=sent.total() / len(calls),
        inside=inside / len(calls),
        commands={name: count / len(calls) for name, count in sent.most_common()},
    )


def _calls(log: Path, known: dict[str, str]) -> list[Call]:
    """Return the answered calls of the runs in `known` (by their input)."""
    offset = time.time() - time.monotonic()
    logged: list[dict[str, Any]] = [json.loads(line) for line in log.read_bytes().splitlines()]
    return [
        Call(known[one["key"]], one["turn"] - 1, one["received"] + offset, one["answered"] + offset)
        for one in logged
        if one["key"] in known and one["outcome"] == "replied"
    ]


def _commits(seen: list[Seen]) -> dict[tuple[str, int], float]:
    """Return when each step's commit began. A script's first arguments are its run and step."""
    script = digest("commit")
    found = {}
    for one in seen:
        if one.name != "evalsha":
            continue
        words = one.words
        if words[1] == script:
            first = 3 + int(words[2])
            found[words[first], int(words[first + 1])] = one.at
    return found


def _name(one: Seen) -> str:
    if one.name not in {"evalsha", "eval"}:
        return one.name
    return _SCRIPTS.get(one.words[1], "script of the transport")


_SCRIPTS = {digest(name): f"script {name}" for name in ("claim", "journal", "commit", "rescue")}


def _addresses(running: Running) -> set[str]:
    """Return from where the workers talk to Redis."""
    found = set()
    for pid in running.pids:
        for connection in psutil.Process(pid).net_connections("tcp"):
            if connection.raddr:
                found.add(f"{connection.laddr.ip}:{connection.laddr.port}")
    return found


def _ms(seconds: list[float], share: float) -> float | None:
    return percentile(seconds, share) * 1000 if seconds else None
