"""The pool as Celery's worker sees it: admits requests to slots and reports how they ended.

Decides in which thread each thing happens. Celery's callbacks, the slots and the flags of a job
that Celery knows belong to the worker's thread; everything else of a job belongs to the loop's.
Must not know what tasks do, nor how messages are acknowledged.

A task body that never waits through ``bridge.await_`` blocks the loop, and with it every task of
the process, until it returns; time limits and revocation cannot interrupt it. The metric
``loop-lag-seconds`` of ``info`` shows it; such work belongs in a thread or on a prefork worker.
"""

import asyncio
import gc
import logging
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Generic, TypeVar

from billiard.einfo import ExceptionInfo
from celery import signals
from celery.concurrency.base import BasePool
from celery.concurrency.prefork import _run_ready_callbacks
from celery.exceptions import ImproperlyConfigured, Terminated
from celery.worker import state as worker_state
from kombu.asynchronous import get_event_loop
from kombu.utils.compat import detect_environment

from stepfleet.worker.engine import bridge, transport
from stepfleet.worker.engine.loop_thread import LoopThread
from stepfleet.worker.engine.pool.direct import direct_call
from stepfleet.worker.engine.pool.job import GRACE_SECONDS, Callbacks, Limits, PoolJob, follow_jobs

_GREENLET_POOLS = ("gevent", "eventlet")

_WHY_NOT_GREENLETS = (
    "The {pool} pool is not supported: with a Redis broker it never takes back the messages of a"
    " worker that died, and acknowledges from every greenlet at once over 10 connections, which"
    " runs tasks twice. Start the worker without -P (stepfleet.worker.engine.pool gives 1,000"
    " tasks at once per process), or with -P prefork, -P threads or -P solo."
)


def check_pool(pool: object) -> None:
    """Raise ``ImproperlyConfigured`` for gevent and eventlet: a name, or a pool class."""
    name = pool if isinstance(pool, str) else f"{getattr(pool, '__module__', '')}:"
    for refused in _GREENLET_POOLS:
        if name == refused or f".{refused}:" in f".{name}":
            raise ImproperlyConfigured(_WHY_NOT_GREENLETS.format(pool=refused))


def refuse_greenlet_pools(sender: Any = None, **_: object) -> None:
    """End the start of a worker under gevent or eventlet: ``worker_init.connect(...)``.

    Raises ``SystemExit`` with the reason, since Celery only logs other exceptions of receivers.
    A package that is not installed already ends ``celery -P gevent`` before any app is loaded.
    """
    try:
        check_pool(getattr(sender, "pool_cls", None))
        check_pool(detect_environment())  # type: ignore[no-untyped-call]
    except ImproperlyConfigured as error:
        raise SystemExit(str(error)) from None


Call = Callable[[], None]


class HubOutbox:
    """Delivers calls that any thread posts in the hub's thread, which polls ``fileno()``."""

    def __init__(self) -> None:
        self._calls: deque[Call] = deque()
        self._woken = False  # a wake-up is under way that will deliver what is queued
        self._reader, self._writer = socket.socketpair()
        self._reader.settimeout(0)
        self._writer.settimeout(0)

    def fileno(self) -> int:
        """File descriptor that becomes readable with a post; -1 once closed."""
        return self._reader.fileno()

    def post(self, call: Call) -> None:
        """Queue the call and wake the poller, once for any number of calls not yet delivered."""
        self._calls.append(call)
        if not self._woken:
            self._wake()

    def deliver(self) -> None:
        """Make the queued calls; what they post meanwhile waits for the next round."""
        with suppress(OSError):  # nothing to read, or closed
            self._reader.recv(4096)
        self._woken = False
        try:
            for _ in range(len(self._calls)):
                self._calls.popleft()()
        finally:
            if self._calls:
                self._wake()

    def wait(self, seconds: float) -> None:
        """Wait for a post with the signal handlers of the main thread running meanwhile."""
        if not self._calls and self._reader.fileno() >= 0:
            # A signal's handler may end the pool, and close this, while we wait here.
            with suppress(OSError, ValueError):
                select.select([self._reader], [], [], seconds)

    def close(self) -> None:
        """Close both ends."""
        self._reader.close()
        self._writer.close()

    def _wake(self) -> None:
        self._woken = True
        with suppress(OSError):  # full means that a wake-up is pending; closed that nobody polls
            self._writer.send(b"\0")


class DirectOutbox:
    """Makes calls where they are posted: for Celery's blocking loop, which polls no descriptor."""

    def __init__(self) -> None:
        self._posted = threading.Event()

    def post(self, call: Call) -> None:
        """Make the call at once."""
        call()
        self._posted.set()

    def deliver(self) -> None:
        """Nothing is ever left to deliver."""

    def wait(self, seconds: float) -> None:
        """Wait for the next post."""
        self._posted.wait(seconds)
        self._posted.clear()

    def close(self) -> None:
        """Nothing to free."""


T = TypeVar("T")


class Slots(Generic[T]):
    """``limit`` slots; used from one thread at a time."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.running: set[T] = set()
        self.waiting: deque[T] = deque()

    def queue(self, job: T) -> None:
        """Let the job wait for a slot."""
        self.waiting.append(job)

    def take(self) -> T | None:
        """Give a free slot to the job that waits longest; None where no slot or no job is there."""
        if not self.waiting or len(self.running) >= self.limit:
            return None
        job = self.waiting.popleft()
        self.running.add(job)
        return job

    def free(self, job: T) -> None:
        """Take the job's slot back; repeating it is harmless."""
        self.running.discard(job)

    def drop_waiting(self) -> int:
        """Forget the jobs that have no slot; return how many they were."""
        count = len(self.waiting)
        self.waiting.clear()
        return count

    def resize(self, change: int) -> None:
        """Add slots, or remove them as they become free; raises ``ValueError`` below one slot."""
        if self.limit + change < 1:
            raise ValueError(
                f"the pool has {self.limit} slots and needs at least 1: shrink it by less than"
                f" {-change}, or stop the worker with `celery control shutdown`"
            )
        self.limit += change


logger = logging.getLogger("celery.pool")

_OBJECTS, _OBJECTS_PER_SLOT = 50_000, 200
"""New objects after which garbage is collected. Tasks in progress are none: to look through those
of a thousand slots takes tenths of a second, in which the loop stands still."""
_OLDER_THRESHOLDS = (5, 100)
_DRAIN_ROUND_SECONDS = 0.2
_CANCEL_SECONDS = 1.0


class Pool(BasePool):
    """Runs ``limit`` tasks at once on one event loop."""

    signal_safe = False
    body_can_be_buffer = True
    task_join_will_block = True

    def __init__(self, limit: int | None = None, *args: Any, **options: Any) -> None:
        super().__init__(limit, *args, **options)
        self._slots: Slots[PoolJob] = Slots(limit or 1)
        self._outbox = DirectOutbox() if self.options.get("threads", True) else HubOutbox()
        self._thread: LoopThread | None = None
        self._starting: deque[PoolJob] = deque()
        self._starts_are_due = False
        self._scaler: Any = None
        self._completed = 0
        self._abandoned = 0
        signals.celeryd_after_setup.connect(self._note_worker_options)

    # ------------------------------------------------------------------ start and stop

    def on_start(self) -> None:
        """Start the loop, and warn of options that have no effect."""
        for option in ("maxtasksperchild", "max_memory_per_child"):
            if self.options.get(option):
                logger.warning(
                    "worker_%s has no effect: stepfleet.worker.engine.pool runs every task in the"
                    " worker process itself. Restart the worker instead to give memory back",
                    {"maxtasksperchild": "max_tasks_per_child"}.get(option, option),
                )
        follow_jobs(self.app)
        self._thread = LoopThread("stepfleet-pool")
        self._thread.start()
        bridge.create(self._thread)
        signals.worker_process_init.send(sender=self._hostname)
        gc.collect()
        gc.freeze()
        gc.set_threshold(_OBJECTS + _OBJECTS_PER_SLOT * self._slots.limit, *_OLDER_THRESHOLDS)

    def register_with_event_loop(self, loop: Any) -> None:
        """Let the worker's hub deliver what the loop posts; called for every new connection."""
        if isinstance(self._outbox, HubOutbox):
            loop.add_reader(self._outbox.fileno(), self._outbox.deliver)

    def on_close(self) -> None:
        """Start nothing more; the broker gives what waits for a slot to others."""
        self._slots.drop_waiting()

    def flush(self) -> None:
        """Forget what waits for a slot: the connection is lost, and the broker sends it again."""
        self._slots.drop_waiting()

    def on_stop(self) -> None:
        """Wait for the tasks that run (warm shutdown), or end them where it is a cold one."""
        self.on_close()
        if self._slots.running:
            logger.warning("Waiting for %s running tasks to end", len(self._slots.running))
        self._drain()
        self._end_loop()

    def on_terminate(self) -> None:
        """End the tasks that run and report nothing about them, so that late ones run again."""
        self.on_close()
        self._end_all()
        self._drain(within=GRACE_SECONDS + 1)
        self._end_loop()

    def _drain(self, within: float | None = None) -> None:
        deadline = None if within is None else time.monotonic() + within
        hub = get_event_loop()
        while self._slots.running and self._thread is not None:
            self._outbox.wait(_DRAIN_ROUND_SECONDS)
            self._outbox.deliver()
            if hub is not None:  # nobody else runs it now; acknowledgements must not wait
                hub.fire_timers()  # type: ignore[no-untyped-call]
                _run_ready_callbacks(hub)
            if _is_cold() and deadline is None:
                self._end_all()
                deadline = time.monotonic() + GRACE_SECONDS + 1
            if deadline is not None and time.monotonic() > deadline:
                break

    def _end_all(self) -> None:
        for job in self._slots.running:
            job.settled = True
            job.end()

    def _end_loop(self) -> None:
        thread, self._thread = self._thread, None
        if thread is None:
            return
        bridge.abandon(thread)
        thread.stop(_close_everything(), within=bridge.CLOSE_SECONDS + _CANCEL_SECONDS + 1)
        self._outbox.close()
        signals.worker_process_shutdown.send(sender=self._hostname, pid=os.getpid(), exitcode=0)

    # ------------------------------------------------------------------ requests

    def on_apply(
        self,
        target: Callable[..., object],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        **options: Any,
    ) -> PoolJob | None:
        """Run the request as soon as a slot is free; None once the pool is closed."""
        if self._thread is None or self._state not in (None, self.RUN):
            return None
        callbacks = Callbacks(
            accepted=options["accept_callback"],
            succeeded=options["callback"],
            failed=options["error_callback"],
            timed_out=options["timeout_callback"],
        )
        limits = Limits(
            soft=options.get("soft_timeout") or self.options.get("soft_timeout"),
            hard=options.get("timeout") or self.options.get("timeout"),
        )
        body, loop = partial(target, *args, **(kwargs or {})), self._thread.loop
        direct = direct_call(getattr(callbacks.succeeded, "__self__", None))
        job = PoolJob(body, callbacks, limits, self, loop, direct)
        self._in_slots_thread(self._admit, job)
        return job

    def _in_slots_thread(self, call: Callable[..., object], *args: object) -> None:
        if isinstance(self._outbox, HubOutbox):
            call(*args)
        elif self._thread is not None:
            self._thread.submit(call, *args)

    def _admit(self, job: PoolJob) -> None:
        self._slots.queue(job)
        self._start_waiting(job)

    def _start_waiting(self, new: PoolJob | None = None) -> None:
        """Start what gets a slot; Celery has just looked whether `new` was revoked."""
        while self._thread is not None and (job := self._slots.take()) is not None:
            if job is not new and _was_revoked(job):
                self._slots.free(job)
                continue
            self._report(job.callbacks.accepted, os.getpid(), time.monotonic())
            self._starting.append(job)
            if not self._starts_are_due:
                self._starts_are_due = True
                self._thread.submit(self._begin_jobs)

    def _begin_jobs(self) -> None:
        """Called in the loop's thread, once for all jobs that get a slot meanwhile."""
        self._starts_are_due = False
        for _ in range(len(self._starting)):
            self._starting.popleft().begin()

    # ------------------------------------------------------------------ reports of jobs

    def finished(self, job: PoolJob, outcome: object) -> None:
        """Called in the loop's thread."""
        self._outbox.post(partial(self._settle, job, outcome))

    def limit_reached(self, job: PoolJob, *, soft: bool) -> None:
        """Called in the loop's thread."""
        self._outbox.post(partial(self._report_limit, job, soft))

    def abandoned(self, job: PoolJob) -> None:
        """Called in the loop's thread."""
        self._outbox.post(partial(self._write_off, job))

    def is_revoked(self, job: PoolJob) -> bool:
        """Return whether the job was revoked, and not cancelled because the worker stops."""
        return bool(getattr(_request_of(job), "_already_revoked", False))

    def _settle(self, job: PoolJob, outcome: object) -> None:
        self._slots.free(job)
        self._completed += 1
        if not job.settled:
            job.settled = True
            if job.terminated_by is not None:
                self._report(job.callbacks.failed, _terminated(job.terminated_by))
            elif isinstance(outcome, ExceptionInfo):
                self._report(job.callbacks.failed, outcome)
            else:
                self._report(job.callbacks.succeeded, outcome)
        self._start_waiting()

    def _report_limit(self, job: PoolJob, soft: bool) -> None:
        if job.settled or job.terminated_by is not None:
            return
        job.settled = not soft
        limit = job.limits.soft if soft else job.limits.hard
        self._report(job.callbacks.timed_out, soft, limit)

    def _write_off(self, job: PoolJob) -> None:
        if job not in self._slots.running:
            return
        logger.error(
            "A task was ended and still ran %s s later: its coroutine ignores CancelledError, or"
            " waits for a thread. Its slot is free again, its outcome is dropped: %r",
            GRACE_SECONDS,
            _request_of(job),
        )
        self._abandoned += 1
        self._settle(job, None)

    def _report(self, callback: Callable[..., object], *args: object) -> None:
        try:
            callback(*args)
        except MemoryError:
            raise
        except Exception:
            logger.exception("Pool callback raised an exception")

    # ------------------------------------------------------------------ remote control

    def terminate_job(self, pid: int, signal: int | None = None) -> None:
        """Nothing: Celery ends the job itself next (`PoolJob.terminate`); all share one process."""

    def grow(self, n: int = 1) -> None:
        """Add ``n`` slots."""
        self._resize(n)

    def shrink(self, n: int = 1) -> None:
        """Remove ``n`` slots, busy ones as they become free; raises ``ValueError`` below one.

        An autoscaler keeps one slot, whatever its minimum is.
        """
        if self._scaler is not None and n >= self._slots.limit:
            self._scaler.min_concurrency = 1
            n = self._slots.limit - 1
        self._resize(-n)

    def _resize(self, change: int) -> None:
        self._slots.resize(change)
        self.limit = self._slots.limit
        self._in_slots_thread(self._start_waiting)

    @property
    def num_processes(self) -> int:
        """The slots: Celery sizes its prefetch by this."""
        return self._slots.limit

    def _get_info(self) -> dict[str, Any]:
        thread = self._thread
        info: dict[str, Any] = {
            "implementation": "stepfleet.worker.engine.pool:Pool",
            "max-concurrency": self._slots.limit,
            "processes": [os.getpid()],
            "max-tasks-per-child": "N/A",
            "timeouts": [self.options.get("soft_timeout") or 0, self.options.get("timeout") or 0],
            "running": len(self._slots.running),
            "waiting": len(self._slots.waiting),
            "completed": self._completed,
            "abandoned": self._abandoned,
            "event-loop": thread.implementation if thread else "N/A",
            "loop-lag-seconds": round(thread.lag, 4) if thread else 0.0,
            "worst-loop-lag-seconds": round(thread.worst_lag, 4) if thread else 0.0,
        }
        if broker := transport.counts():
            info["broker"] = broker
        return info

    @property
    def _hostname(self) -> Any:
        return (self.options.get("initargs") or (None, None))[1]

    def _note_worker_options(self, instance: Any = None, **_: object) -> None:
        if getattr(instance, "pool", None) is self:
            self._scaler = getattr(instance, "autoscaler", None)


def _is_cold() -> bool:
    return worker_state.should_terminate not in (None, False)


def _request_of(job: PoolJob) -> Any:
    return getattr(job.callbacks.succeeded, "__self__", None)


def _was_revoked(job: PoolJob) -> bool:
    request = _request_of(job)
    return bool(request is not None and request.revoked())


def _terminated(signum: int) -> ExceptionInfo:
    try:
        raise Terminated(signum)  # noqa: TRY301 billiard's record needs a traceback
    except Terminated:
        return ExceptionInfo()


async def _close_everything() -> None:
    # Collaborators first: tasks of this loop send their last messages.
    for failure in await bridge.close_collaborators():
        logger.warning("Could not close a collaborator of the event loop: %r", failure)
    await _cancel_the_others()
    await asyncio.get_running_loop().shutdown_asyncgens()


async def _cancel_the_others() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=_CANCEL_SECONDS)
