"""Measures what Stepfleet is compared with: the floor process, and a bare Celery chain."""

import importlib
import json
import os
import subprocess
import sys
import time
from dataclasses import replace

import redis
from loads import LONGEST, Setup, servers
from processes import HERE, ended, redis_server, until, workers
from readings import SECTIONS, Cost, Reading


def floor(runs: int, steps: int, latency: str, *, stub: bool = False, at_once: int = 0) -> Cost:
    """Measure the floor: `at_once` runs (0: all) in flight in one process."""
    with servers(Setup(latency=latency, stub=stub)) as (url, served):
        command = [sys.executable, str(HERE / "floor.py"), "--redis", url, "--model", served.url]
        command += ["--runs", str(runs), "--steps", str(steps), "--at-once", str(at_once)]
        piped = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=HERE
        )
        with ended(piped) as process, redis.Redis.from_url(url) as client:
            assert process.stdin is not None  # noqa: S101 - both are pipes
            assert process.stdout is not None  # noqa: S101
            if "ready" not in json.loads(process.stdout.readline()):
                raise RuntimeError("the floor did not start")
            before = Reading.now([client.info(*SECTIONS)], [], [served.pid])
            process.stdin.write("go\n")
            process.stdin.flush()
            found = json.loads(process.stdout.readline())
            after = Reading.now([client.info(*SECTIONS)], [], [served.pid])
    # The process measures itself, without its warm-up.
    after = replace(
        after,
        at=before.at + found["wall"],
        worker_cpu=found["cpu"],
        worker_memory=[int(found["memory"])],
    )
    return Cost.between(before, after, int(found["steps"]))


def chain(runs: int, steps: int, *arguments: str) -> Cost:
    """Measure a bare chain of no-ops in one stock worker process."""
    with (
        redis_server() as (url, _),
        redis.Redis.from_url(url) as client,
        workers(1, {"BENCH_BROKER": url}, *arguments, app="chain:app") as pids,
    ):
        os.environ["BENCH_BROKER"] = url
        sys.modules.pop("chain", None)
        step = importlib.import_module("chain").step
        step.delay(0, 0)
        until(lambda: client.get("chain-done") == b"1")
        before = Reading.now([client.info(*SECTIONS)], pids, [])
        started = time.monotonic()
        for run in range(runs):
            step.delay(run, steps - 1)
        finished = str(runs + 1).encode()
        end = until(lambda: client.get("chain-done") == finished, within=LONGEST)
        after = replace(
            Reading.now([client.info(*SECTIONS)], pids, []), at=before.at + end - started
        )
    return Cost.between(before, after, runs * steps)
