"""Composes a worker's telemetry: nothing, spans, metrics, or both, around its collaborators.

Where nothing is wanted, collaborators are returned as they are: the step's path is as if this room
did not exist, and neither OpenTelemetry nor prometheus_client is imported.
"""

import asyncio
import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from importlib import import_module
from typing import Any

from stepfleet.orchestrator.settings.settings import Settings
from stepfleet.orchestrator.store.fleet.overview import FleetFigures
from stepfleet.worker.models import Models
from stepfleet.worker.ports import StepObserver, Toolbox
from stepfleet.worker.telemetry.config import TelemetryConfig, available, telemetry_config
from stepfleet.worker.telemetry.observations import Observation
from stepfleet.worker.telemetry.wrappers import (
    Inside,
    ObservedModels,
    ObservedToolbox,
    TelemetryObserver,
)

log = logging.getLogger(__name__)

MOST_WAITING = 10_000
PAUSE_SECONDS = 0.2

Export = Callable[[Observation], None]


class ExportQueue:
    """Passes observations to all `exporters`, in order; at most `most` wait. `dropped` counts."""

    def __init__(self, exporters: Sequence[Export], most: int = MOST_WAITING) -> None:
        self._exporters = exporters
        self._most = most
        self._waiting: deque[Observation] = deque()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="stepfleet-telemetry", daemon=True)
        self.dropped = 0

    def start(self) -> None:
        """Begin to export."""
        self._thread.start()

    def offer(self, observation: Observation) -> None:
        """Queue an observation. Never waits."""
        if len(self._waiting) >= self._most:
            self.dropped += 1
        else:
            self._waiting.append(observation)

    def close(self) -> None:
        """Export what waits, and end. Blocks until then."""
        self._ended.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._ended.wait(PAUSE_SECONDS):
            self._export()
        self._export()

    def _export(self) -> None:
        while self._waiting:
            observation = self._waiting.popleft()
            for export in self._exporters:
                try:
                    export(observation)
                except Exception:
                    log.exception("an observation of a step could not be exported")


FLEET_SECONDS = 10.0
"""How often a worker with metrics reads the figures of the fleet, and how long that may take."""
PROBE_SECONDS = 0.5
LAST_SECONDS = 2.0
"""How long an ending worker waits for a collector to take what is left."""


class Instrumentation:
    """Spans, metrics, both or neither. Belongs to one process and one event loop."""

    def __init__(self, config: TelemetryConfig, worker: str) -> None:
        exporters: list[Export] = []
        self._inside: Inside = lambda *_: contextlib.nullcontext()
        self._closers: list[Callable[[], None]] = []
        self._metrics = None
        self._queue: ExportQueue | None = None
        if config.spans:
            from stepfleet.worker.telemetry.spans import Spans  # noqa: PLC0415 - only if wanted

            spans = Spans(worker)
            spans.serve_the_process()
            exporters.append(spans.export)
            self._inside = spans.inside
            self._closers.append(spans.close)
        if config.port is not None:
            from stepfleet.worker.telemetry.metrics import Metrics  # noqa: PLC0415 - as above

            self._metrics = Metrics()
            self._metrics.serve(config.host, config.port)
            exporters.append(self._metrics.export)
            self._closers.append(self._metrics.close)
        if exporters:
            self._queue = ExportQueue(exporters)
            self._queue.start()

    def models(self) -> Models:
        """Return the models of the worker, with their calls observed."""
        return ObservedModels(self._inside) if self._queue else Models(connections=0)

    def toolbox(self, toolbox: Toolbox) -> Toolbox:
        """Return the toolbox with its executions observed."""
        return ObservedToolbox(toolbox, self._inside) if self._queue else toolbox

    def observers(self) -> tuple[StepObserver, ...]:
        """Return what exports the steps and tool calls that end."""
        return (TelemetryObserver(self._queue.offer),) if self._queue else ()

    def rescued(self, many: int) -> None:
        """Count overdue runs that were dispatched again."""
        if self._metrics:
            self._metrics.rescued(many)

    def background(
        self,
        steps: Callable[[], float],
        calls: Callable[[], float],
        fleet: Callable[[], Awaitable[FleetFigures]],
    ) -> list[Coroutine[Any, Any, None]]:
        """Return what runs beside the steps.

        `steps` and `calls` return how many are held, `fleet` reads the figures of all workers.
        """
        metrics, queue = self._metrics, self._queue
        if metrics is None or queue is None:
            return []
        metrics.gauge("stepfleet_steps_in_flight", "Steps that are held", steps)
        metrics.gauge("stepfleet_tool_tasks_in_flight", "Tool tasks that are held", calls)
        metrics.gauge(
            "stepfleet_telemetry_dropped", "Attempts that were not exported", lambda: queue.dropped
        )
        return [measure_loop_lag(metrics.observe_lag), read_fleet(fleet, metrics.show_fleet)]

    async def aclose(self) -> None:
        """Export what is left; what a collector does not take within two seconds is lost."""
        if (queue := self._queue) is None:
            return
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def end() -> None:
            queue.close()
            for close in self._closers:
                close()
            with contextlib.suppress(RuntimeError):  # nobody waits any more, the loop is closed
                loop.call_soon_threadsafe(ended.set)

        # A daemon of our own: the loop's threads would be waited for at the end of the process.
        threading.Thread(target=end, name="stepfleet-telemetry-end", daemon=True).start()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_SECONDS):
                await ended.wait()


def instrument(
    settings: Settings, worker: str, environment: Mapping[str, str] | None = None
) -> Instrumentation:
    """Return the instrumentation that the settings ask for.

    Raises `ConfigurationError` where what they ask for is not installed.
    """
    variables = os.environ if environment is None else environment
    return Instrumentation(available(telemetry_config(settings, variables)), worker)


def import_exporters(settings: Settings) -> None:
    """Import what is wanted, before the event loop runs and children are forked.

    Raises `ConfigurationError` where it is not installed.
    """
    config = available(telemetry_config(settings, os.environ))
    if config.spans:
        import_module("stepfleet.worker.telemetry.spans")
    if config.port is not None:
        import_module("stepfleet.worker.telemetry.metrics")


async def measure_loop_lag(observe: Callable[[float], None]) -> None:
    """Observe, twice a second, how much later than due the event loop wakes."""
    clock = asyncio.get_running_loop().time
    while True:
        due = clock() + PROBE_SECONDS
        await asyncio.sleep(PROBE_SECONDS)
        observe(max(clock() - due, 0.0))


async def read_fleet(
    fleet: Callable[[], Awaitable[FleetFigures]], show: Callable[[FleetFigures | None], None]
) -> None:
    """Show the fleet's figures, read now and then; None where they cannot be read."""
    while True:
        try:
            async with asyncio.timeout(FLEET_SECONDS):
                show(await fleet())
        except Exception:  # also a timeout; whatever it is, the next reading may succeed
            log.debug("the fleet's figures cannot be read", exc_info=True)
            show(None)
        await asyncio.sleep(FLEET_SECONDS)
