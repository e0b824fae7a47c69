"""A bare Celery chain of no-ops: each task sends the next. What a step is compared with."""

import os

from celery import Celery

app = Celery("chain", broker=os.environ["BENCH_BROKER"])
app.conf.update(
    task_ignore_result=True,
    task_acks_late=True,
    worker_send_task_events=True,
    task_default_queue="chain",
    worker_prefetch_multiplier=4,
)


@app.task(name="chain.step")
def step(run: int, left: int) -> None:
    """Send the next link, or count a finished chain."""
    if left:
        step.delay(run, left - 1)
    else:
        app.backend_client().incr("chain-done")


def backend_client() -> object:
    """Return a Redis client for the count of finished chains."""
    import redis  # noqa: PLC0415 - only in the worker

    return redis.Redis.from_url(os.environ["BENCH_BROKER"])


app.backend_client = backend_client
