"""Steps per second, CPU per step, and wall time over the ideal, beside a bare Celery chain.

python benchmarks/steps.py                      # latency 0 and 1 s, one and two workers
python benchmarks/steps.py --runs 3000 --latency 1 --workers 1
"""

import argparse
import importlib
import json
import os
import platform
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version

import redis
from agents import runner
from processes import HERE, Usage, model_server, redis_server, until, usage, workers
from rich.console import Console
from rich.table import Table

from stepfleet.orchestrator import Fleet

PACKAGES = ("celery", "kombu", "redis", "httpx", "aiohttp", "uvloop")
console = Console(stderr=True)


@dataclass(frozen=True)
class Figures:
    """One measurement. Times in seconds, CPU in milliseconds per step, memory in bytes."""

    what: str
    workers: int
    latency: float
    runs: int
    steps: int
    wall: float
    worker_cpu_ms: float
    redis_cpu_ms: float
    redis_commands: float
    memory: int

    @property
    def rate(self) -> float:
        """Steps per second."""
        return self.runs * self.steps / self.wall

    @property
    def over_ideal(self) -> float | None:
        """Wall time over the time that the model alone takes."""
        return self.wall / (self.latency * self.steps) if self.latency else None


def fleet(count: int, latency: float, runs: int, steps: int) -> Figures:
    """Measure Stepfleet, from the submission's end to the last run's."""
    with redis_server() as (url, redis_pid), model_server(latency) as model:
        environment = {
            "STEPFLEET_REDIS_URL": url,
            "STEPFLEET_AGENTS": str(HERE / "agents.py"),
            "STEPFLEET_SLOTS": str(max(runs, 100)),
            "OPENAI_BASE_URL": model,
            "OPENAI_API_KEY": "none",
        }
        with workers(count, environment) as pids, Fleet(url) as client:
            warm = client.submit_batch(lines(count * 20, 2), agent=runner)
            warm.wait(timeout=60)
            client_redis = redis.Redis.from_url(url)
            before, commands = _used(pids, redis_pid, client_redis)
            started = time.monotonic()
            batch = client.submit_batch(lines(runs, steps), agent=runner)
            end = until(lambda: batch.progress().done == runs, within=600)
            after, commands_after = _used(pids, redis_pid, client_redis)
    total = runs * steps
    return Figures(
        "stepfleet",
        count,
        latency,
        runs,
        steps,
        end - started,
        (after[0].cpu - before[0].cpu) * 1000 / total,
        (after[1].cpu - before[1].cpu) * 1000 / total,
        (commands_after - commands) / total,
        after[0].memory // count,
    )


def chain(runs: int, steps: int, *arguments: str) -> Figures:
    """Measure a bare chain of no-ops in one stock worker process."""
    with (
        redis_server() as (url, redis_pid),
        redis.Redis.from_url(url) as client,
        workers(1, {"BENCH_BROKER": url}, *arguments, app="chain:app") as pids,
    ):
        os.environ["BENCH_BROKER"] = url
        sys.modules.pop("chain", None)
        step = importlib.import_module("chain").step
        step.delay(0, 0)
        until(lambda: client.get("chain-done") == b"1")
        before, commands = _used(pids, redis_pid, client)
        started = time.monotonic()
        for run in range(runs):
            step.delay(run, steps - 1)
        end = until(lambda: client.get("chain-done") == str(runs + 1).encode(), within=600)
        after, commands_after = _used(pids, redis_pid, client)
    total = runs * steps
    return Figures(
        f"bare chain ({' '.join(arguments)})",
        1,
        0.0,
        runs,
        steps,
        end - started,
        (after[0].cpu - before[0].cpu) * 1000 / total,
        (after[1].cpu - before[1].cpu) * 1000 / total,
        (commands_after - commands) / total,
        after[0].memory,
    )


def lines(runs: int, steps: int) -> list[dict[str, str]]:
    """Return the lines of a batch; the time makes each measurement a batch of its own."""
    stamp = time.time_ns()
    return [{"id": f"{stamp}-{n}", "input": f"{steps} turns, run {stamp}-{n}"} for n in range(runs)]


def _used(
    pids: list[int], redis_pid: int, client: "redis.Redis"
) -> tuple[tuple[Usage, Usage], int]:
    commands = int(client.info("stats")["total_commands_processed"])
    return (usage(pids), usage([redis_pid])), commands


def show(measured: list[Figures]) -> None:
    """Print the table."""
    table = Table(title="steps: one LLM call and one tool each; the last step of a run has no tool")
    for name in (
        "what",
        "workers",
        "latency s",
        "runs x steps",
        "wall s",
        "wall / ideal",
        "steps/s",
    ):
        table.add_column(name, justify="right")
    for name in ("worker CPU ms/step", "Redis CPU ms/step", "Redis commands/step", "MB/worker"):
        table.add_column(name, justify="right")
    for one in measured:
        table.add_row(
            one.what,
            str(one.workers),
            f"{one.latency:g}",
            f"{one.runs} x {one.steps}",
            f"{one.wall:.2f}",
            f"{one.over_ideal:.2f}" if one.over_ideal else "-",
            f"{one.rate:.0f}",
            f"{one.worker_cpu_ms:.2f}",
            f"{one.redis_cpu_ms:.3f}",
            f"{one.redis_commands:.1f}",
            f"{one.memory / 1e6:.0f}",
        )
    Console().print(table)


def main() -> None:
    """Measure and print; `--json` writes the figures to a file as well."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--latency", type=float, nargs="*", default=[0.0, 1.0])
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--no-chain", action="store_true")
    parser.add_argument("--json")
    asked = parser.parse_args()
    console.print(platform.platform(), *(f"{name} {version(name)}" for name in PACKAGES))
    measured: list[Figures] = []
    for _ in range(asked.repeat):
        if not asked.no_chain:
            measured.append(chain(asked.runs, asked.steps, "-P", "solo"))
        for latency in asked.latency:
            for count in asked.workers:
                measured.append(fleet(count, latency, asked.runs, asked.steps))
                console.print(measured[-1])
    show(measured)
    bare = [one.rate for one in measured if one.what.startswith("bare")]
    ours = [one.rate for one in measured if one.what == "stepfleet" and not one.latency]
    if bare and ours:
        ratio = statistics.median(ours) / statistics.median(bare)
        Console().print(f"steps/s at latency 0 over the bare chain's tasks/s: {ratio:.2f}")
    if asked.json:
        with open(asked.json, "w", encoding="utf-8") as file:  # noqa: PTH123 - a name as given
            json.dump([asdict(one) for one in measured], file, indent=1)


if __name__ == "__main__":
    main()
