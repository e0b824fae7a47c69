"""A Celery app whose tasks do what the tests of pool and transport look at.

Configured by environment variables alone: TOY_BROKER, TOY_REDIS (results and notes of the tasks)
and TOY_CONF (JSON, laid over the settings below).
"""

# mypy: allow-untyped-decorators

import asyncio
import contextvars
import json
import os
import threading
import time
from typing import Any

import redis
import redis.asyncio
from celery import Celery, current_task, signals
from celery.exceptions import Ignore, Reject, Retry, SoftTimeLimitExceeded

from stepfleet.worker.engine import transport
from stepfleet.worker.engine.bridge import PerLoop, await_
from stepfleet.worker.engine.pool import refuse_greenlet_pools

transport.register()

NOTES = os.environ["TOY_REDIS"]

app = Celery("toy", broker=os.environ["TOY_BROKER"], backend=os.environ.get("TOY_BACKEND") or NOTES)
app.conf.update(
    worker_pool="stepfleet.worker.engine.pool:Pool",
    worker_concurrency=1000,
    worker_prefetch_multiplier=1,
    worker_send_task_events=True,
    worker_cancel_long_running_tasks_on_connection_loss=False,
    broker_connection_retry_on_startup=True,
    task_default_queue="toy",
    redis_max_connections=50,
)
app.conf.update(json.loads(os.environ.get("TOY_CONF", "{}")))

signals.worker_init.connect(refuse_greenlet_pools)

# With a timeout of the socket, redis-py sends inside `asyncio.wait_for`, which on Python 3.11 loses
# a cancellation that comes as the sending ends: a task would outlast its time limit.
notes = PerLoop(
    lambda: redis.asyncio.Redis.from_url(NOTES, decode_responses=True, socket_timeout=None),
    lambda r: r.aclose(),
)
sync_notes = redis.Redis.from_url(NOTES, decode_responses=True)
barriers: dict[str, asyncio.Barrier] = {}
colour: contextvars.ContextVar[str] = contextvars.ContextVar("colour")


@app.task
def add(x: int, y: int) -> Any:
    return x + y


@app.task
def noop() -> Any:
    return None


@app.task
def count(name: str) -> Any:
    """Count executions: a message that ran twice counts twice."""
    sync_notes.hincrby("ran", name, 1)


@app.task
def meet(name: str, parties: int) -> Any:
    """Return only when so many of these run at once."""

    async def wait() -> Any:
        barrier = barriers.setdefault(name, asyncio.Barrier(parties))
        return await barrier.wait()

    return await_(wait())


async def opened(name: str) -> Any:
    client = notes()
    await client.rpush("started", name)
    while not await client.exists(f"open:{name}"):  # noqa: ASYNC110 another process opens it
        await asyncio.sleep(0.02)  # polls: the test ends the worker that waits too long


@app.task(bind=True)
def gate(self: Any, name: str) -> Any:
    """Note the start, then wait until the test opens the gate; note a cancellation."""

    async def wait() -> Any:
        try:
            await opened(name)
        except asyncio.CancelledError:
            await notes().rpush("cancelled", name)
            raise
        return name

    result = await_(wait())
    sync_notes.rpush("finished", name)
    return result


@app.task(acks_late=True)
def late_gate(name: str) -> Any:
    return gate.run(name)


@app.task
def stubborn(name: str) -> Any:
    """Swallow every cancellation until the gate opens."""

    async def wait() -> Any:
        while True:
            try:
                await opened(name)
            except asyncio.CancelledError:
                await notes().rpush("cancelled", name)
            else:
                return name

    result = await_(wait())
    sync_notes.rpush("finished", name)
    return result


@app.task
def tidy(name: str) -> Any:
    """Clean up after the soft limit, waiting on the loop once more, and succeed."""
    try:
        await_(opened(name))
    except SoftTimeLimitExceeded as limit:

        async def clean() -> Any:
            async with asyncio.timeout(30):
                await notes().rpush("tidied", name)

        await_(clean())
        return f"tidied after {limit.args}"
    return "not interrupted"


@app.task
def fail(message: str) -> Any:
    async def explode() -> Any:
        await asyncio.sleep(0)
        raise ValueError(message)

    await_(explode())


class UnpicklableError(Exception):
    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.lock = threading.Lock()


@app.task
def fail_unpicklable() -> Any:
    raise UnpicklableError("holds a lock")


@app.task(bind=True, max_retries=1, default_retry_delay=0)
def retry_once(self: Any) -> Any:
    if self.request.retries == 0:
        raise self.retry(exc=ValueError("again"))
    return self.request.retries


@app.task
def raise_retry() -> Any:
    raise Retry("by hand", exc=ValueError("by hand"))


@app.task
def ignore() -> Any:
    raise Ignore


@app.task(acks_late=True)
def reject() -> Any:
    raise Reject("no", requeue=False)


@app.task
def leave() -> Any:
    raise SystemExit(3)


@app.task
def cancel_itself() -> Any:
    async def give_up() -> Any:
        raise asyncio.CancelledError

    await_(give_up())


@app.task
def block(seconds: float) -> Any:
    time.sleep(seconds)  # blocks the loop: that is what the task is for
    return seconds


@app.task(bind=True)
def identify(self: Any, name: str, parties: int) -> Any:
    """Tell whose request each place of the task sees while others interleave."""
    colour.set(name)
    seen = [self.request.id, current_task.request.id, colour.get()]

    async def child() -> Any:
        await asyncio.sleep(0)
        return [self.request.id, current_task.request.id, colour.get()]

    async def inside() -> Any:
        barrier = barriers.setdefault("identify", asyncio.Barrier(parties))
        await barrier.wait()
        seen.extend([self.request.id, colour.get()])
        for found in await asyncio.gather(child(), child()):
            seen.extend(found)
        seen.extend(await asyncio.to_thread(lambda: [current_task.request.id, colour.get()]))
        colour.set(f"{name}!")

    await_(inside())
    return [*seen, self.request.id, colour.get()]


@app.task
def sum_in_a_thread() -> Any:
    """Wait for a coroutine from a thread that the task started."""

    async def both() -> Any:
        await asyncio.sleep(0)
        return 2

    async def in_thread() -> Any:
        return await asyncio.to_thread(lambda: await_(both()))

    return await_(in_thread())


@app.task
def one_client_per_loop() -> Any:
    async def same() -> Any:
        return notes() is notes()

    return [await_(same()), os.getpid()]


@app.task
def await_in_a_coroutine() -> Any:
    async def wrong() -> Any:
        return await_(asyncio.sleep(0))

    await_(wrong())
