"""Stepfleet itself: one worker process, a batch submitted by `Fleet`, waited for with `wait`."""

import contextlib
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import job as jobs
import redis

from stepfleet import Fleet

AGENTS = Path(__file__).resolve().parent.parent / "agents.py"
WARM_SECONDS = 60


@contextlib.contextmanager
def worker(job: jobs.Job) -> Iterator[None]:
    """Run one worker for as long as the block lasts."""
    settings = {
        "STEPFLEET_REDIS_URL": job.store,
        "STEPFLEET_AGENTS": str(AGENTS),
        "STEPFLEET_SLOTS": str(job.concurrency),
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "celery", "-A", "stepfleet.worker.app", "worker", "-l", "warning"],
        env={**os.environ, **settings},
        cwd=job.folder,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def lines(names: list[str], turns: int) -> list[dict[str, str]]:
    """Return the lines of a batch."""
    return [{"id": name, "input": jobs.question(name, turns)} for name in names]


def main() -> None:
    """Do the job."""
    job = jobs.from_arguments()
    if job.kind == "always":
        with redis.Redis.from_url(job.store) as server:
            server.config_set("appendfsync", "always")
    agent = runpy.run_path(str(AGENTS))["runner"]
    with worker(job), Fleet(job.store) as fleet:
        warm = [f"warm-{number}" for number in range(jobs.WARM_RUNS)]
        fleet.submit_batch(lines(warm, jobs.WARM_TURNS), agent=agent).wait(timeout=WARM_SECONDS)
        jobs.wait_for_start()
        started = time.monotonic()
        batch = fleet.submit_batch(lines(jobs.names(job), job.turns), agent=agent)
        progress = batch.wait()
        jobs.tell_end(progress.completed, time.monotonic() - started)


if __name__ == "__main__":
    main()
