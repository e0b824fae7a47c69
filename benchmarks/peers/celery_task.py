"""Celery without anything else: the whole agent loop in one task, the messages kept in Redis.

What one writes first: acknowledged late, so that a killed worker's runs come again and go on from
the messages that were stored after the last step; one shared client per process, with as many
connections to Redis as tasks (the default of 100 fails above that, acknowledgements too); results
ignored. The worker is Celery's own with the pool that `kind` names, `concurrency` tasks at a time.
"""

import contextlib
import functools
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import calls
import job as jobs
import redis
from celery import Celery

JOB = "PEER_JOB"
SETTINGS = json.loads(os.environ.get(JOB, "{}"))
LOOK_SECONDS = 0.02

app = Celery("celery_task")
app.conf.update(
    broker_url=SETTINGS.get("store", "memory://"),
    broker_transport_options={"max_connections": SETTINGS.get("concurrency", 1)},
    task_ignore_result=True,
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    worker_prefetch_multiplier=1,
    broker_connection_retry_on_startup=True,
)

# The packages of the model call are there before the pool forks, as they are for those who import
# them at the top of a module.
if SETTINGS:
    importlib.import_module(calls.PACKAGES[SETTINGS["client"]])


@functools.cache
def collaborators() -> tuple[Callable[[list[calls.Message]], calls.Message], Any]:
    """Return the model call and the Redis client of this process."""
    job = jobs.Job(**json.loads(os.environ[JOB]))
    store = redis.Redis.from_url(job.store, max_connections=job.concurrency)
    return calls.sync_call(job), store


@app.task(name="agent.run")
def run(name: str, turns: int) -> None:
    """Call the model and the tool until it is done; store the messages after each step."""
    call, store = collaborators()
    kept = store.get(f"run:{name}")
    question = {"role": "user", "content": jobs.question(name, turns)}
    messages = json.loads(kept) if kept else [question]
    while True:
        answer = call(messages)
        messages += [answer, *jobs.use_tools(answer)]
        store.set(f"run:{name}", json.dumps(messages))
        if not answer.get("tool_calls"):
            break
    if answer["content"] == "done":
        store.sadd("finished", name)  # a set: a run may come twice


@contextlib.contextmanager
def worker(job: jobs.Job) -> Iterator[None]:
    """Run the worker for as long as the block lasts."""
    command = [*(sys.executable, "-m", "celery", "-A", "celery_task", "worker", "-P", job.kind)]
    process = subprocess.Popen(
        [*command, "-c", str(job.concurrency), "--loglevel", "warning"],
        env={**os.environ, JOB: json.dumps(job.__dict__)},
        cwd=Path(__file__).parent,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def wait_for(store: Any, finished: int) -> None:
    """Wait until so many runs are finished."""
    while store.scard("finished") < finished:
        time.sleep(LOOK_SECONDS)


def main() -> None:
    """Submit the job to a worker, and wait for its end."""
    job = jobs.from_arguments()
    os.environ[JOB] = json.dumps(job.__dict__)
    app.conf.broker_url = job.store
    app.conf.broker_transport_options = {}
    store = redis.Redis.from_url(job.store)
    # Every process has to make its own client once.
    warm = job.concurrency if job.kind == "prefork" else jobs.WARM_RUNS
    with worker(job):
        for number in range(warm):
            run.delay(f"warm-{number}", jobs.WARM_TURNS)
        wait_for(store, warm)
        jobs.wait_for_start()
        started = time.monotonic()
        for name in jobs.names(job):
            run.delay(name, job.turns)
        wait_for(store, warm + job.runs)
        jobs.tell_end(job.runs, time.monotonic() - started)


if __name__ == "__main__":
    main()
