"""The fleet for plain code: the asynchronous methods, each run in one event loop of a thread.

Holds no logic. `blocking`, `iterating` and `giving_batch` keep the signatures and docstrings of
the methods that they wrap, for editors and type checkers too.
"""

import asyncio
import contextlib
import functools
import os
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, Unpack

from celery import Celery

from stepfleet.orchestrator.agents.agent import Agent
from stepfleet.orchestrator.agents.config import RunOverrides
from stepfleet.orchestrator.client.approvals import AsyncFleetApprovals
from stepfleet.orchestrator.client.archive import AsyncFleetArchive
from stepfleet.orchestrator.client.batch import AsyncBatch, AsyncFleetBatches
from stepfleet.orchestrator.client.fleet import AsyncFleet, debugged
from stepfleet.orchestrator.client.history import AsyncFleetHistory
from stepfleet.orchestrator.client.inputs import Input
from stepfleet.orchestrator.client.limits import AsyncFleetCache, AsyncFleetLimits
from stepfleet.orchestrator.client.local import DebugStep
from stepfleet.orchestrator.client.runs import AsyncFleetRuns
from stepfleet.orchestrator.client.schedules import AsyncFleetSchedules
from stepfleet.orchestrator.client.session import DATA_FOLDER
from stepfleet.orchestrator.errors import ConfigurationError, StoreError
from stepfleet.orchestrator.settings.settings import Settings

A = TypeVar("A")
P = ParamSpec("P")
T = TypeVar("T")
_LEFT: list[object] = []
_CLOSING_SECONDS = 30.0
_FORKED = (
    "this process was forked while results were being read; their reader belongs to the parent"
    " process: read them again"
)
_PORTALS: "weakref.WeakSet[Portal]" = weakref.WeakSet()


def abandon_sockets(loop: asyncio.AbstractEventLoop, *kept: object) -> None:
    """Abandon `loop` and the sockets that it watches; keep `kept` from the garbage collector.

    For the child of a fork, where the loop's thread does not run.
    """
    _LEFT.extend((loop, kept))
    null = os.open(os.devnull, os.O_RDWR)
    try:
        for descriptor in _descriptors(loop):
            with contextlib.suppress(OSError):
                os.dup2(null, descriptor, inheritable=False)
    finally:
        os.close(null)


def _descriptors(loop: Any) -> list[int]:
    """Return the descriptors of an asyncio loop: watched ones, the selector, the waker."""
    found: list[int] = []
    selector = getattr(loop, "_selector", None)
    if selector is not None:
        found += [key.fd for key in (selector.get_map() or {}).values()]
        if hasattr(selector, "fileno"):
            found.append(selector.fileno())
    if (waker := getattr(loop, "_csock", None)) is not None:
        found.append(waker.fileno())
    return [one for one in found if one > 2]  # noqa: PLR2004 - never the standard streams


class Portal:
    """One event loop in a daemon thread, for calls from anywhere else; begun by the first call.

    Ends, after `closing`, when it is closed, collected, or the interpreter ends. In a forked child
    `forget` drops what `closing` would close, and returns it: it has to stay uncollected.
    """

    def __init__(
        self,
        closing: Callable[[], Coroutine[Any, Any, None]],
        forget: Callable[[], object] = lambda: None,
    ) -> None:
        self.forks = 0
        """The forks of the process since: objects from before a fork are useless after it."""
        self._closing = closing
        self._forget = forget
        self._beginning = threading.Lock()
        self._running: asyncio.AbstractEventLoop | None = None
        self._end: weakref.finalize[Any, Any] | None = None
        _follow_forks()
        _PORTALS.add(self)

    def close(self) -> None:
        """End the loop, after `closing`; a further call begins another one."""
        with self._beginning:
            end, self._end, self._running = self._end, None, None
        if end is not None:
            end()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what `work` returns; an interrupt of the caller cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop())
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def each(self, items: AsyncGenerator[T, None]) -> Iterator[T]:
        """Yield the items of an asynchronous iterator. Raises `StoreError` after a fork."""
        forks, loop = self.forks, self._loop()
        try:
            while (found := self.call(anext_of(items))) is not None:
                yield found[0]
                if forks != self.forks:
                    raise StoreError(_FORKED)
        finally:
            # An iterator that an error keeps may end after its fleet, at the interpreter's own end.
            if forks == self.forks and loop is self._running and loop.is_running():
                self.call(items.aclose())

    def forked(self) -> None:
        """Begin anew in a process that was forked; the parent's connections are not touched."""
        self.forks += 1
        self._beginning = threading.Lock()  # another thread of the parent may hold the old one
        left, self._running = self._running, None
        if self._end is not None:
            self._end.detach()
            self._end = None
        if left is not None:
            abandon_sockets(left, self._forget())

    def _loop(self) -> asyncio.AbstractEventLoop:
        with self._beginning:
            if self._running is None:
                loop = asyncio.new_event_loop()
                thread = threading.Thread(
                    target=loop.run_forever, name="stepfleet-client", daemon=True
                )
                thread.start()
                self._running = loop
                self._end = weakref.finalize(self, _end, loop, thread, self._closing)
            return self._running


@cache
def _follow_forks() -> None:
    os.register_at_fork(after_in_child=_begin_anew)


def _begin_anew() -> None:
    for portal in list(_PORTALS):
        portal.forked()


async def anext_of(items: AsyncGenerator[T, None]) -> tuple[T] | None:
    """Return the next item in a tuple; None at the end."""
    async for item in items:
        return (item,)
    return None


def _end(
    loop: asyncio.AbstractEventLoop,
    thread: threading.Thread,
    closing: Callable[[], Coroutine[Any, Any, None]],
) -> None:
    async def end() -> None:
        with contextlib.suppress(Exception):
            await asyncio.wait_for(closing(), _CLOSING_SECONDS)
        loop.stop()

    asyncio.run_coroutine_threadsafe(end(), loop)
    # Garbage may be collected in the loop's own thread, which cannot wait for itself.
    if thread is not threading.current_thread():
        thread.join(_CLOSING_SECONDS)
        if not thread.is_alive():
            loop.close()


class _Blocking:
    """An asynchronous object, and the loop that its methods run in."""

    def __init__(self, wrapped: Any, portal: Portal) -> None:
        self._wrapped = wrapped
        self._portal = portal


def blocking(
    method: Callable[Concatenate[A, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[_Blocking, P], T]:
    """Return `method` as one that waits for its result."""

    @functools.wraps(method)
    def call(self: _Blocking, /, *args: P.args, **options: P.kwargs) -> T:
        return self._portal.call(method(self._wrapped, *args, **options))

    return call


def iterating(
    method: Callable[Concatenate[A, P], AsyncGenerator[T, None]],
) -> Callable[Concatenate[_Blocking, P], Iterator[T]]:
    """Return `method` as one that gives a plain iterator."""

    @functools.wraps(method)
    def call(self: _Blocking, /, *args: P.args, **options: P.kwargs) -> Iterator[T]:
        return self._portal.each(method(self._wrapped, *args, **options))

    return call


def giving_batch(
    method: Callable[Concatenate[A, P], Coroutine[Any, Any, AsyncBatch]],
) -> "Callable[Concatenate[_Blocking, P], Batch]":
    """Return `method` as one that waits for a batch."""

    @functools.wraps(method)
    def call(self: _Blocking, /, *args: P.args, **options: P.kwargs) -> "Batch":
        return Batch(self._portal.call(method(self._wrapped, *args, **options)), self._portal)

    return call


class Batch(_Blocking):
    """A batch. `skipped` lists the problems of the lines that a submission left out."""

    _wrapped: AsyncBatch

    @property
    def id(self) -> str:
        """The batch's id (UUID)."""
        return self._wrapped.id

    @property
    def skipped(self) -> tuple[str, ...]:
        """What was wrong with the lines that this submission left out."""
        return self._wrapped.skipped

    @property
    def is_new(self) -> bool:
        """Whether this submission created runs: false for a batch that was there before."""
        return self._wrapped.is_new

    @property
    def skipped_count(self) -> int:
        """How many lines this submission left out."""
        return self._wrapped.skipped_count

    def run_ids(self) -> Iterator[str]:
        """Yield the ids of the batch's runs in the order of its lines, also of skipped ones."""
        return self._wrapped.run_ids()

    progress = blocking(AsyncBatch.progress)
    then = giving_batch(AsyncBatch.then)
    watch = iterating(AsyncBatch.watch)
    on_standstill = blocking(AsyncBatch.on_standstill)
    results = iterating(AsyncBatch.results)
    table = blocking(AsyncBatch.table)
    to_arrow = blocking(AsyncBatch.to_arrow)
    to_pandas = blocking(AsyncBatch.to_pandas)
    wait = blocking(AsyncBatch.wait)
    cancel = blocking(AsyncBatch.cancel)
    pause = blocking(AsyncBatch.pause)
    resume = blocking(AsyncBatch.resume)
    retry = blocking(AsyncBatch.retry)
    failures = blocking(AsyncBatch.failures)
    limit_waits = blocking(AsyncBatch.limit_waits)


class FleetBatches(_Blocking):
    """The batches of a fleet: `fleet.batches`; `fleet.submit_batch` makes a new one."""

    get = giving_batch(AsyncFleetBatches.get)
    newest = blocking(AsyncFleetBatches.newest)
    page = blocking(AsyncFleetBatches.page)
    check = blocking(AsyncFleetBatches.check)


class FleetCache(_Blocking):
    """The response cache, which all workers of the fleet share: `fleet.cache`."""

    statistics = blocking(AsyncFleetCache.statistics)
    clear = blocking(AsyncFleetCache.clear)


class FleetLimits(_Blocking):
    """Limits that all workers of the fleet share: `fleet.limits`."""

    all = blocking(AsyncFleetLimits.all)
    use = blocking(AsyncFleetLimits.use)
    wait_of = blocking(AsyncFleetLimits.wait_of)
    set = blocking(AsyncFleetLimits.set)
    provide = blocking(AsyncFleetLimits.provide)
    clear = blocking(AsyncFleetLimits.clear)


class FleetApprovals(_Blocking):
    """Calls that wait for a person: `fleet.approvals`."""

    page = blocking(AsyncFleetApprovals.page)
    of_run = blocking(AsyncFleetApprovals.of_run)
    of_batch = blocking(AsyncFleetApprovals.of_batch)
    all = iterating(AsyncFleetApprovals.all)


class FleetArchive(_Blocking):
    """Ended runs that were moved to files, in a folder or in object storage: `fleet.archive`.

    They are read as before: `fleet.runs.show`, results, lists. To change one, `restore` it first.
    """

    state = blocking(AsyncFleetArchive.state)
    move = blocking(AsyncFleetArchive.move)
    restore = blocking(AsyncFleetArchive.restore)
    verify = blocking(AsyncFleetArchive.verify)


class FleetSchedules(_Blocking):
    """Batches that are submitted again and again: `fleet.schedules`."""

    add = blocking(AsyncFleetSchedules.add)
    all = blocking(AsyncFleetSchedules.all)
    get = blocking(AsyncFleetSchedules.get)
    pause = blocking(AsyncFleetSchedules.pause)
    resume = blocking(AsyncFleetSchedules.resume)
    remove = blocking(AsyncFleetSchedules.remove)
    run_now = giving_batch(AsyncFleetSchedules.run_now)
    troubles = blocking(AsyncFleetSchedules.troubles)


class FleetHistory(_Blocking):
    """The past of runs: `fleet.history`."""

    snapshot = blocking(AsyncFleetHistory.snapshot)
    checkpoint = blocking(AsyncFleetHistory.checkpoint)
    checkpoints = iterating(AsyncFleetHistory.checkpoints)
    restore = blocking(AsyncFleetHistory.restore)
    save_state = blocking(AsyncFleetHistory.save_state)
    load_state = blocking(AsyncFleetHistory.load_state)
    fork = blocking(AsyncFleetHistory.fork)
    compare = blocking(AsyncFleetHistory.compare)
    tool_traces = blocking(AsyncFleetHistory.tool_traces)
    clear_tool_traces = blocking(AsyncFleetHistory.clear_tool_traces)
    get_cost_calls = blocking(AsyncFleetHistory.get_cost_calls)
    get_cost_stats = blocking(AsyncFleetHistory.get_cost_stats)
    get_cost_summary = blocking(AsyncFleetHistory.get_cost_summary)
    reset_cost_tracking = blocking(AsyncFleetHistory.reset_cost_tracking)


class FleetRuns(_Blocking):
    """The runs of a fleet: `fleet.runs`. `page` lists them; all else goes by their ids.

    Read one: `result` for its result so far, `wait` for the final one, `view` for a chat window,
    `show` for everything stored. Follow one: `steps` for results of steps, `events` for the event
    log and streamed text, `display` for a chat window.
    """

    page = blocking(AsyncFleetRuns.page)
    failures = blocking(AsyncFleetRuns.failures)
    timeline = blocking(AsyncFleetRuns.timeline)
    tree = blocking(AsyncFleetRuns.tree)
    find = blocking(AsyncFleetRuns.find)
    show = blocking(AsyncFleetRuns.show)
    waits_for = blocking(AsyncFleetRuns.waits_for)
    standstill = blocking(AsyncFleetRuns.standstill)
    result = blocking(AsyncFleetRuns.result)
    wait = blocking(AsyncFleetRuns.wait)
    view = blocking(AsyncFleetRuns.view)
    events = iterating(AsyncFleetRuns.events)
    steps = iterating(AsyncFleetRuns.steps)
    display = iterating(AsyncFleetRuns.display)
    cancel = blocking(AsyncFleetRuns.cancel)
    pause = blocking(AsyncFleetRuns.pause)
    resume = blocking(AsyncFleetRuns.resume)
    retry = blocking(AsyncFleetRuns.retry)
    send = blocking(AsyncFleetRuns.send)
    purge = blocking(AsyncFleetRuns.purge)


class Fleet(_Blocking):
    """A fleet as its client sees it; `AsyncFleet` with methods that block.

    Use it as a context manager, or `close` it; one that is forgotten is closed when it is
    collected or the interpreter ends. One that was made, or used, before the process was forked
    (by a pool of workers, say) connects anew in the child. `on_progress` functions are called in
    another thread.
    """

    _wrapped: AsyncFleet
    runs: FleetRuns
    """Existing runs: read, follow, control, remove."""
    batches: FleetBatches
    """Submitted batches."""
    history: FleetHistory
    """The past of runs: checkpoints, forks, comparisons, costs, tool calls."""
    cache: FleetCache
    """The response cache."""
    limits: FleetLimits
    """Limits that all workers share."""
    approvals: FleetApprovals
    """Calls that wait for a person."""
    schedules: FleetSchedules
    """Batches that are submitted again and again."""
    archive: FleetArchive
    """Ended runs that were moved to files."""

    def __init__(
        self,
        redis_url: str | None = None,
        *,
        broker_url: str | None = None,
        settings: Settings | None = None,
        app: Celery | None = None,
        user: str | None = None,
    ) -> None:
        self._use(
            AsyncFleet(redis_url, broker_url=broker_url, settings=settings, app=app, user=user)
        )

    @classmethod
    def local(cls, agents: Iterable[Agent], *, folder: str | Path | None = DATA_FOLDER) -> "Fleet":
        """Return a local fleet: a private server, and a worker in a thread of this process.

        For development, without any set-up: `with Fleet.local(agents=[clerk]) as fleet`, or
        `async with AsyncFleet.local(...)`. Runs are kept in `folder`, which commands in this
        directory find too; None is a temporary one. The worker also does open runs of its agents
        that it finds there, and hands back what is open at the end. Tools have no time limits:
        `breakpoint()` works in them. At the first use raises `ConfigurationError` that names the
        extra `local` where it is missing.
        """
        made = cls.__new__(cls)
        made._use(AsyncFleet.local(agents, folder=folder))  # noqa: SLF001 - its own
        return made

    def debug(
        self,
        given: Input,
        agent: Agent | None = None,
        *,
        at: int = 0,
        **overrides: Unpack[RunOverrides],
    ) -> Iterator[DebugStep]:
        """Execute a run here, step by step: each step is done when it is taken.

        `given` is an input as that of `submit`, or the id of a run: then a copy of it goes on after
        its first `at` steps, with `agent` as it is now, and the run stays as it is. Model calls
        and tools are real. They are executed in the calling thread and on a private server
        that is removed at the end: `breakpoint()` works in tools, and neither leases nor limits of
        time end a person's session. `agent` may be left out in a local fleet with one agent.
        Raises `ConfigurationError` with the fix.
        """
        _refuse_event_loop()
        # The steps run in this thread, and not in the portal's.
        order = self._portal.call(self._wrapped._debugged(given, agent, at))  # noqa: SLF001
        with asyncio.Runner() as runner:
            steps = debugged(self._wrapped.settings, order, overrides)
            try:
                while (step := runner.run(anext_of(steps))) is not None:
                    yield step[0]
            finally:
                runner.run(steps.aclose())

    def _use(self, fleet: AsyncFleet) -> None:
        portal = Portal(fleet.aclose, fleet.forget)
        super().__init__(fleet, portal)
        self.runs = FleetRuns(fleet.runs, portal)
        self.batches = FleetBatches(fleet.batches, portal)
        self.history = FleetHistory(fleet.history, portal)
        self.cache = FleetCache(fleet.cache, portal)
        self.limits = FleetLimits(fleet.limits, portal)
        self.approvals = FleetApprovals(fleet.approvals, portal)
        self.schedules = FleetSchedules(fleet.schedules, portal)
        self.archive = FleetArchive(fleet.archive, portal)

    def __enter__(self) -> Self:
        self.check()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Disconnect."""
        self._portal.close()

    check = blocking(AsyncFleet.check)
    warnings = blocking(AsyncFleet.warnings)
    overview = blocking(AsyncFleet.overview)
    scale = blocking(AsyncFleet.scale)
    costs = blocking(AsyncFleet.costs)
    cost_lines = iterating(AsyncFleet.cost_lines)
    pause = blocking(AsyncFleet.pause)
    resume = blocking(AsyncFleet.resume)
    acting_for = staticmethod(AsyncFleet.acting_for)
    audit = iterating(AsyncFleet.audit)
    decide = blocking(AsyncFleet.decide)
    submit = blocking(AsyncFleet.submit)
    run = blocking(AsyncFleet.run)
    run_with_steps = blocking(AsyncFleet.run_with_steps)
    run_with_messages = blocking(AsyncFleet.run_with_messages)
    run_stream = iterating(AsyncFleet.run_stream)
    submit_batch = giving_batch(AsyncFleet.submit_batch)


def _refuse_event_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    msg = (
        "debug() executes steps in this thread, whose event loop runs already: write "
        "`async for step in AsyncFleet().debug(...)`"
    )
    raise ConfigurationError(msg)
