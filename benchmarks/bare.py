"""Measures what Stepfleet is compared with: the floor process, and a bare Celery chain."""

import importlib
import json
import os
import subprocess
import sys
import time

import redis
from loads import LONGEST, Cost, Reading, Setup, servers
from processes import HERE, ended, redis_server, until, usage, workers
from redis_use import use


def floor(runs: int, steps: int, latency: str, *, stub: bool = False, at_once: int = 0) -> Cost:
    """Measure the floor: `at_once` runs (0: all) in flight in one process."""
    with servers(Setup(latency=latency, stub=stub)) as (url, redis_pid, served):
        command = [sys.executable, str(HERE / "floor.py"), "--redis", url, "--model", served.url]
        command += ["--runs", str(runs), "--steps", str(steps), "--at-once", str(at_once)]
        piped = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=HERE
        )
        with ended(piped) as process, redis.Redis.from_url(url) as client:
            assert process.stdin is not None  # noqa: S101 - both were asked for
            assert process.stdout is not None  # noqa: S101
            if "ready" not in json.loads(process.stdout.readline()):
                raise RuntimeError("the floor did not start")
            before = Reading(0, 0, usage([redis_pid]).cpu, usage([served.pid]).cpu, 0, use(client))
            process.stdin.write("go\n")
            process.stdin.flush()
            told = json.loads(process.stdout.readline())
            asked = use(client).since(before.redis)
            redis_cpu = usage([redis_pid]).cpu - before.redis_cpu
            model_cpu = usage([served.pid]).cpu - before.model_cpu
    done = int(told["steps"])
    return Cost(
        steps=done,
        wall=told["wall"],
        worker_ms=told["cpu"] * 1000 / done,
        redis_ms=redis_cpu * 1000 / done,
        model_ms=model_cpu * 1000 / done,
        round_trips=asked.reads / done,
        scripts=asked.scripts / done,
        commands=asked.commands / done,
        memory=int(told["memory"]),
        redis_memory=asked.memory / done,
    )


def chain(runs: int, steps: int, *arguments: str) -> Cost:
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
        before, asked = (usage(pids), usage([redis_pid])), use(client)
        started = time.monotonic()
        for run in range(runs):
            step.delay(run, steps - 1)
        finished = str(runs + 1).encode()
        end = until(lambda: client.get("chain-done") == finished, within=LONGEST)
        after, told = (usage(pids), usage([redis_pid])), use(client).since(asked)
    total = runs * steps
    return Cost(
        steps=total,
        wall=end - started,
        worker_ms=(after[0].cpu - before[0].cpu) * 1000 / total,
        redis_ms=(after[1].cpu - before[1].cpu) * 1000 / total,
        model_ms=0.0,
        round_trips=told.reads / total,
        scripts=told.scripts / total,
        commands=told.commands / total,
        memory=after[0].memory,
        redis_memory=told.memory / total,
    )
