"""Composes a worker's telemetry: nothing, spans, metrics, or both, around its collaborators.

Workers of a fleet serve metrics where prometheus_client is installed. What else executes steps, in
a program of the user's or beside a worker, does where a port is asked for. Where nothing is wanted,
collaborators are returned as they are: the step's path is as if this room did not exist, and
neither OpenTelemetry nor prometheus_client is imported.
"""

import asyncio
import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import datetime
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from stepfleet.orchestrator.errors import AgentException, ConfigurationError
from stepfleet.orchestrator.events.envelope import Events
from stepfleet.orchestrator.models.llm import LLM
from stepfleet.orchestrator.protocol.claim import Claim, Committed, Refusal
from stepfleet.orchestrator.protocol.verdict import Verdict
from stepfleet.orchestrator.protocol.waiting import Delivered, TakenCall
from stepfleet.orchestrator.records.calls.tools import NOT_EXECUTED, ToolCall, ToolCallRecord
from stepfleet.orchestrator.records.errors import ErrorType
from stepfleet.orchestrator.records.responses import LLMResponse, ModelRequest
from stepfleet.orchestrator.settings.settings import Settings
from stepfleet.orchestrator.store.fleet.figures import FleetFigures
from stepfleet.orchestrator.tools import ToolInvocation, ToolRegistry
from stepfleet.worker.models import Models, Watch
from stepfleet.worker.ports import StepObserver
from stepfleet.worker.telemetry.observations import (
    CANCELLED,
    ModelCallObservation,
    Observation,
    RefusalObservation,
    StepObservation,
    ToolCallObservation,
    ToolTaskObservation,
    begin,
    current_attempt,
)
from stepfleet.worker.telemetry.span_plans import new_span_id
from stepfleet.worker.toolbox.box import LocalToolbox
from stepfleet.worker.toolbox.threads import ToolThreads

log = logging.getLogger(__name__)

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
FIX = "install stepfleet[telemetry]"
METRICS_PORT = 9464
"""Where a worker serves metrics if nobody says otherwise: OpenTelemetry's port for Prometheus."""


@dataclass(frozen=True, slots=True)
class TelemetryConfig:
    """Which telemetry to make; `port` is None without metrics. Traces are sent by `protocol`."""

    spans: bool = False
    port: int | None = None
    host: str = ""
    protocol: str = ""
    explicit: bool = False
    asked: bool = False
    """The port is in the settings."""

    def __bool__(self) -> bool:
        """Return whether any telemetry is wanted."""
        return self.spans or self.port is not None


def telemetry_config(
    settings: Settings, environment: Mapping[str, str], *, serves: bool = False
) -> TelemetryConfig:
    """Return what settings and environment ask for. By default nothing.

    `serves`: a process of a fleet, which serves metrics if the settings do not say otherwise.
    """
    if settings.telemetry == "off":
        return TelemetryConfig()
    variables = {
        name: environment[name].strip() for name in environment if name.startswith("OTEL_")
    }
    disabled = (
        variables.get("OTEL_SDK_DISABLED", "").lower() == "true"
        or variables.get("OTEL_TRACES_EXPORTER") == "none"
    )
    explicit, given = settings.telemetry == "on", settings.metrics_port
    spans = explicit or any(variables.get(name) for name in ENDPOINTS)
    protocol = next((variables[name] for name in PROTOCOLS if variables.get(name)), "")
    return TelemetryConfig(
        spans=spans and not disabled,
        port=(METRICS_PORT if serves else None) if given is None else given or None,
        host=settings.metrics_host,
        protocol=protocol,
        explicit=explicit,
        asked=bool(given),
    )


def available(config: TelemetryConfig) -> TelemetryConfig:
    """Return the part of `config` that this installation can provide.

    Raises `ConfigurationError` where something is missing that a setting of ours asks for. Of
    OpenTelemetry's variables, which may be meant for others in the same environment, a warning.
    """
    if config.port is not None and not _is_installed("prometheus_client"):
        if config.asked:
            msg = f"metrics_port is set, and prometheus_client is missing: {FIX}"
            raise ConfigurationError(msg)
        config = replace(config, port=None)
    reason = _why_not(config) if config.spans else ""
    if reason and config.explicit:
        raise ConfigurationError(f"telemetry is on, and {reason}")
    if reason:
        log.warning("no spans are sent: %s, or set STEPFLEET_TELEMETRY=off", reason)
        return replace(config, spans=False)
    return config


def _why_not(config: TelemetryConfig) -> str:
    if not _is_installed("opentelemetry.exporter.otlp.proto.http"):
        return f"OpenTelemetry's exporter is missing: {FIX}"
    if config.protocol == "grpc":
        return (
            "OTEL_EXPORTER_OTLP_PROTOCOL is grpc, which workers do not speak: set it to"
            " http/protobuf, and the endpoint to the collector's HTTP port (4318)"
        )
    return ""


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # of a package above it
        return False


Offer = Callable[[Observation], None]
Inside = Callable[[str, int], AbstractContextManager[Any]]
"""Makes spans of code that runs in it stand below a span: of that run, with that id."""


class TelemetryObserver(StepObserver):
    """Offers every attempt at a step, and every tool task, that ends."""

    def __init__(self, offer: Offer) -> None:
        self._offer = offer

    def claimed(self, claim: Claim | Refusal) -> None:
        """Begin an attempt, or count a refusal."""
        if isinstance(claim, Refusal):
            self._offer(RefusalObservation(claim.why))
        else:
            begin(claim.run_id, claim.now)

    def committed(
        self, claim: Claim, verdict: Verdict, events: Events, committed: Committed
    ) -> None:
        """Offer the attempt, unless it is decided again."""
        del events
        attempt = current_attempt(claim.run_id)
        if attempt and not committed.wanted:
            calls = tuple(attempt.calls)
            applied = committed.applied
            self._offer(StepObservation(claim, verdict, calls, attempt.began, attempt.now, applied))

    def call_taken(self, taken: TakenCall) -> None:
        """Begin an attempt."""
        begin(taken.hint.run_id, taken.now)

    def call_delivered(
        self, taken: TakenCall, record: ToolCallRecord, delivered: Delivered
    ) -> None:
        """Offer the task."""
        attempt = current_attempt(taken.hint.run_id)
        if attempt is None:
            return
        error = record.error
        if error is not None and error.code != NOT_EXECUTED and not attempt.calls:
            began, now = attempt.began, attempt.now
            name, times = record.tool_name, taken.attempt
            attempt.calls.append(
                ToolCallObservation(
                    new_span_id(), began, now, name, record.call_id, times, error.code
                )
            )
        self._offer(ToolTaskObservation(taken, tuple(attempt.calls), delivered.applied))


class ObservedToolbox(LocalToolbox):
    """The toolbox of a worker, its executions seen."""

    def __init__(self, threads: ToolThreads, inside: Inside) -> None:
        super().__init__(threads)
        self._inside = inside

    async def execute(
        self,
        call: ToolCall,
        tools: ToolRegistry,
        invocation: ToolInvocation,
        *,
        clock: Callable[[], datetime],
    ) -> ToolCallRecord:
        """Run one call. Tool trouble becomes the record's error; only cancellation raises."""
        attempt = current_attempt(invocation.run_id)
        if attempt is None:
            return await super().execute(call, tools, invocation, clock=clock)
        span_id, began, code = new_span_id(), attempt.now, ""
        try:
            with self._inside(invocation.run_id, span_id):
                record = await super().execute(call, tools, invocation, clock=clock)
            code = record.error.code if record.error else ""
        except asyncio.CancelledError:
            code = CANCELLED
            raise
        finally:
            # A name that the model made up stays out: it would be a metric's label for ever.
            name = call.name if call.name in tools else ""
            times = invocation.attempt
            attempt.calls.append(
                ToolCallObservation(span_id, began, attempt.now, name, call.id, times, code)
            )
        return record


class ObservedModels(Models):
    """The models of a worker, their calls seen: those of steps, and those of its memory."""

    def __init__(self, inside: Inside, *, watch: Watch | None = None) -> None:
        super().__init__(watch=watch)
        self._inside = inside

    async def generate(
        self,
        request: ModelRequest,
        *,
        llm: LLM | None = None,
        on_text: Callable[[str], None] | None = None,
    ) -> LLMResponse:
        """Make one model call. Raises nothing but `AgentException`s."""
        attempt = current_attempt()
        if attempt is None:
            return await super().generate(request, llm=llm, on_text=on_text)
        span_id, began = new_span_id(), attempt.now
        response, code, kind = None, "", ""
        try:
            with self._inside(attempt.run_id, span_id):
                response = await super().generate(request, llm=llm, on_text=on_text)
        except asyncio.CancelledError:
            code = kind = CANCELLED
            raise
        except AgentException as error:
            code, kind = error.code, error.type.value
            raise
        except BaseException:
            code = kind = ErrorType.UNKNOWN.value
            raise
        finally:
            ended = attempt.now
            attempt.calls.append(
                ModelCallObservation(span_id, began, ended, request, response, code, kind)
            )
        return response


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
"""How often a process with metrics reads the fleet's figures, and how long that may take."""
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

    def models(self, watch: Watch | None = None) -> Models:
        """Return the models of the worker, with their calls observed; `watch` learns of limits."""
        return ObservedModels(self._inside, watch=watch) if self._queue else Models(watch=watch)

    def toolbox(self, threads: ToolThreads) -> LocalToolbox:
        """Return the toolbox of the worker, with its executions observed."""
        return ObservedToolbox(threads, self._inside) if self._queue else LocalToolbox(threads)

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
        """Return what runs in the background.

        `steps` and `calls` return how many are held, `fleet` reads the figures of all workers.
        """
        metrics, queue = self._metrics, self._queue
        if metrics is None or queue is None:
            return []
        metrics.gauge("stepfleet_steps_in_flight", "Steps that are held", steps)
        metrics.gauge("stepfleet_tool_tasks_in_flight", "Tool tasks that are held", calls)
        metrics.count(
            "stepfleet_telemetry_dropped", "Attempts that were not exported", lambda: queue.dropped
        )
        return [measure_loop_lag(metrics.observe_lag), read_fleet(fleet, metrics.show_fleet)]

    async def aclose(self) -> None:
        """Export what is left; what a collector does not take within two seconds is lost.

        A second call does nothing.
        """
        queue, self._queue = self._queue, None
        if queue is None:
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
    settings: Settings,
    worker: str,
    environment: Mapping[str, str] | None = None,
    *,
    serves: bool = False,
) -> Instrumentation:
    """Return the instrumentation that the settings ask for; `serves` as in `telemetry_config`.

    Raises `ConfigurationError` where what they ask for is not installed.
    """
    variables = os.environ if environment is None else environment
    wanted = telemetry_config(settings, variables, serves=serves)
    return Instrumentation(available(wanted), worker)


def import_exporters(settings: Settings) -> None:
    """Import what a worker of the fleet wants, before its loop runs and children are forked.

    Raises `ConfigurationError` where it is not installed.
    """
    config = available(telemetry_config(settings, os.environ, serves=True))
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
