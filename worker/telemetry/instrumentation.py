"""Puts a worker's telemetry together: nothing, spans, metrics, or both, around its collaborators.

Where nothing is wanted, collaborators are returned as they are: the step's path is as if this room
did not exist, and neither OpenTelemetry nor prometheus_client is imported.
"""

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine, Mapping
from importlib import import_module
from typing import Any, Protocol

from stepfleet.orchestrator.settings.settings import Settings
from stepfleet.worker.models import Models
from stepfleet.worker.ports import CallStore, Store, Toolbox
from stepfleet.worker.telemetry.config import Wanted, possible, wanted
from stepfleet.worker.telemetry.export_queue import ExportQueue, Take
from stepfleet.worker.telemetry.wrappers import (
    Inside,
    ObservedCalls,
    ObservedModels,
    ObservedStore,
    ObservedToolbox,
)

LOOK_SECONDS = 0.5
LAST_SECONDS = 2.0
"""How long an ending worker waits for a collector to take what is left."""


class Instrumentation(Protocol):
    """What stands around a worker's collaborators."""

    def models(self) -> Models:
        """Return the models of the worker."""

    def toolbox(self, toolbox: Toolbox) -> Toolbox:
        """Return the toolbox, its executions seen."""

    def store(self, store: Store) -> Store:
        """Return the store of steps, its claims and commits seen."""

    def calls(self, calls: CallStore) -> CallStore:
        """Return the store of tool calls, their ends seen."""

    def rescued(self, many: int) -> None:
        """Hear how many overdue runs were dispatched again."""

    def watches(
        self, steps: Callable[[], float], calls: Callable[[], float]
    ) -> list[Coroutine[Any, Any, None]]:
        """Return what is to run beside the steps; `steps` and `calls` say how many are held."""

    async def aclose(self) -> None:
        """Tell what is left, for a moment at most."""


class Unwatched:
    """No telemetry."""

    def models(self) -> Models:
        """Return the models of the worker."""
        return Models(connections=0)

    def toolbox(self, toolbox: Toolbox) -> Toolbox:
        """Return the toolbox itself."""
        return toolbox

    def store(self, store: Store) -> Store:
        """Return the store itself."""
        return store

    def calls(self, calls: CallStore) -> CallStore:
        """Return the store itself."""
        return calls

    def rescued(self, many: int) -> None:
        """Hear nothing."""

    def watches(
        self, steps: Callable[[], float], calls: Callable[[], float]
    ) -> list[Coroutine[Any, Any, None]]:
        """Return nothing to run."""
        del steps, calls
        return []

    async def aclose(self) -> None:
        """Do nothing."""


class Watched:
    """Spans, metrics or both. Belongs to one process and one event loop."""

    def __init__(self, asked: Wanted, worker: str) -> None:
        takers: list[Take] = []
        self._inside: Inside = lambda *_: contextlib.nullcontext()
        self._ends: list[Callable[[], None]] = []
        self._metrics = None
        if asked.spans:
            from stepfleet.worker.telemetry.spans import Spans  # noqa: PLC0415 - only if wanted

            spans = Spans(worker)
            spans.serve_the_process()
            takers.append(spans.take)
            self._inside = spans.inside
            self._ends.append(spans.close)
        if asked.port is not None:
            from stepfleet.worker.telemetry.metrics import Metrics  # noqa: PLC0415 - as above

            self._metrics = Metrics()
            self._metrics.serve(asked.host, asked.port)
            takers.append(self._metrics.take)
            self._ends.append(self._metrics.close)
        self._gathering = ExportQueue(takers)
        self._gathering.start()

    def models(self) -> Models:
        """Return models whose calls are seen."""
        return ObservedModels(self._inside)

    def toolbox(self, toolbox: Toolbox) -> Toolbox:
        """Return the toolbox, its executions seen."""
        return ObservedToolbox(toolbox, self._inside)

    def store(self, store: Store) -> Store:
        """Return the store of steps, its claims and commits seen."""
        return ObservedStore(store, self._gathering.offer)

    def calls(self, calls: CallStore) -> CallStore:
        """Return the store of tool calls, their ends seen."""
        return ObservedCalls(calls, self._gathering.offer)

    def rescued(self, many: int) -> None:
        """Count overdue runs that were dispatched again."""
        if self._metrics:
            self._metrics.rescued(many)

    def watches(
        self, steps: Callable[[], float], calls: Callable[[], float]
    ) -> list[Coroutine[Any, Any, None]]:
        """Return the watch of the event loop, where there are metrics."""
        metrics = self._metrics
        if metrics is None:
            return []
        dropped = self._gathering
        metrics.watch("stepfleet_steps_in_flight", "Steps that are held", steps)
        metrics.watch("stepfleet_tool_tasks_in_flight", "Tool tasks that are held", calls)
        metrics.watch(
            "stepfleet_telemetry_dropped", "Attempts that were not told", lambda: dropped.dropped
        )
        return [measure_loop_lag(metrics.late)]

    async def aclose(self) -> None:
        """Tell what is left; what a collector does not take within two seconds is lost."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def end() -> None:
            self._gathering.close()
            for one in self._ends:
                one()
            with contextlib.suppress(RuntimeError):  # nobody waits any more, the loop is closed
                loop.call_soon_threadsafe(ended.set)

        # A daemon of our own: the loop's threads would be waited for at the end of the process.
        threading.Thread(target=end, name="stepfleet-telemetry-end", daemon=True).start()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_SECONDS):
                await ended.wait()


def watching(
    settings: Settings, worker: str, environment: Mapping[str, str] | None = None
) -> Instrumentation:
    """Return what stands around a worker's collaborators, as the settings say.

    Raises `ConfigurationError` where what they ask for is not installed.
    """
    asked = possible(wanted(settings, os.environ if environment is None else environment))
    return Watched(asked, worker) if asked else Unwatched()


def import_exporters(settings: Settings) -> None:
    """Import what is wanted, before the event loop runs and children are forked.

    Raises `ConfigurationError` where it is not installed.
    """
    asked = possible(wanted(settings, os.environ))
    if asked.spans:
        import_module("stepfleet.worker.telemetry.spans")
    if asked.port is not None:
        import_module("stepfleet.worker.telemetry.metrics")


async def measure_loop_lag(late: Callable[[float], None]) -> None:
    """Tell, twice a second, how much later than asked the event loop wakes."""
    clock = asyncio.get_running_loop().time
    while True:
        due = clock() + LOOK_SECONDS
        await asyncio.sleep(LOOK_SECONDS)
        late(max(clock() - due, 0.0))
