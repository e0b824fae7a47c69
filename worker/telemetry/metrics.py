"""Metrics for Prometheus, served over HTTP by each worker process, and by keepers.

The only module that imports prometheus_client; imported where metrics are wanted. Labels have few
values: names of agents, models and tools, codes; never runs, and never what a model made up.
"""

import errno
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from threading import Thread
from wsgiref.simple_server import WSGIServer

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
    start_http_server,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from stepfleet.orchestrator.protocol.verdict import Move, Verdict
from stepfleet.orchestrator.records.archive import ArchiveFigures
from stepfleet.orchestrator.records.errors import cause_of
from stepfleet.orchestrator.records.run.results import end_state
from stepfleet.orchestrator.records.state import Lifecycle
from stepfleet.orchestrator.store.fleet.figures import FleetFigures
from stepfleet.orchestrator.version import own_build
from stepfleet.worker.telemetry.observations import (
    CANCELLED,
    ModelCallObservation,
    Observation,
    RefusalObservation,
    StepObservation,
    ToolCallObservation,
    ToolTaskObservation,
)

log = logging.getLogger(__name__)

PORTS = 64
"""How many ports are tried: each process of a machine takes the next one that is free."""
SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120)
WAITS = (0.1, 0.5, 1, 5, 15, 60, 300, 900, 3600, 14400)
LAG = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2, 5)
NOT_FOUND = "TOOL_NOT_FOUND"


FLEET = {
    "queue_length": ("queue_length", "Messages in the queue of steps"),
    "oldest_waiting_seconds": ("oldest_waiting_seconds", "Age of the message that is next"),
    "overdue": ("overdue_runs", "Runs whose lease or time to begin has passed"),
    "oldest_overdue_seconds": ("oldest_overdue_seconds", "By how much that has passed at most"),
    "active": ("active_runs", "Runs that are neither ended nor paused"),
    "workers": ("workers", "Workers that are alive"),
    "slots": ("slots", "Slots of the workers that are alive"),
    "slots_in_use": ("slots_in_use", "Steps and tool calls that they hold"),
    "outages": ("circuits_open", "Services of models that are out: their circuits are open"),
    "late_schedules": ("late_schedules", "Schedules that are behind, or cannot be submitted"),
    "waiting_for_people": ("waiting_for_people", "Calls that wait for an approval or an answer"),
    "oldest_waiting_for_people_seconds": (
        "oldest_waiting_for_people_seconds",
        "How long the first of them has waited",
    ),
    "refuses": ("store_refuses", "What keeps all workers from their work: memory, disk, broker"),
}
"""The gauges of the fleet's figures: the same on every process that serves them."""


QUEUES = {
    "work": "Steps and tool calls that workers of a queue could do now, or do",
    "capacity": "Slots of the living workers of a queue",
}
"""The gauges of each queue: the same on every process that serves them."""


LIMITS = {
    "waiting": "Runs that wait in the line of a limit of the fleet",
    "in_flight": "Calls under way under a limit of the fleet",
    "cool_seconds": "Seconds for which nobody calls under a limit, after a 429",
}
"""The gauges of each limit that is set: the same on every process that serves them."""


ARCHIVE = {
    "runs": ("archived_runs", "Runs that were moved to the archive, in all"),
    "bytes": ("archive_bytes", "Bytes that were written there for them, in all"),
    "due_runs": ("archive_due_runs", "Runs without a batch that are to go there"),
    "due_batches": ("archive_due_batches", "Batches that are to go there"),
    "overdue_seconds": ("archive_overdue_seconds", "How long the first of these has been due"),
    "failing_seconds": ("archive_failing_seconds", "How long moving runs there has failed, 0: no"),
}
"""The gauges of the archive, of a fleet that has one: the same on every process."""


class FleetMetrics:
    """The metrics of a process that does no steps, in a registry of their own.

    They are the figures of the whole fleet, and how this process fares.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)
        self._served: tuple[WSGIServer, Thread] | None = None
        build = self._gauge("stepfleet_build_info", "What is installed here", "version", "commit")
        build.labels(own_build().version, own_build().commit).set(1)
        self._store_up = self._gauge("stepfleet_store_up", "Whether this process reads its Redis")
        self._fleet = {
            field: self._gauge(f"stepfleet_{name}", text) for field, (name, text) in FLEET.items()
        }
        self._queues = {
            field: _Gauges(self._gauge(f"stepfleet_{field}", text, "queue"))
            for field, text in QUEUES.items()
        }
        self._limits = {
            field: _Gauges(self._gauge(f"stepfleet_limit_{field}", text, "limit"))
            for field, text in LIMITS.items()
        }
        self._archive = _Archive()
        self.registry.register(self._archive)
        self._rescued = self._counter("stepfleet_rescued", "Overdue runs dispatched again")
        self._lag = Histogram(
            "stepfleet_loop_lag_seconds",
            "How much later than due the event loop wakes",
            buckets=LAG,
            registry=self.registry,
        )

    def show_fleet(self, figures: FleetFigures | None) -> None:
        """Show the figures of the fleet; None where they could not be read."""
        self._store_up.set(figures is not None)
        for name, gauge in self._fleet.items():
            value = getattr(figures, name, None)
            gauge.set(math.nan if value is None else value)
        for name, gauges in self._queues.items():
            gauges.show(getattr(figures, name) if figures else {})
        limits = figures.limits if figures else ()
        for name, gauges in self._limits.items():
            gauges.show({one.name: getattr(one, name) for one in limits})
        self._archive.show(figures.archive if figures else None)

    def rescued(self, many: int) -> None:
        """Count runs that the rescuer dispatched again."""
        self._rescued.inc(many)

    def observe_lag(self, seconds: float) -> None:
        """Observe how late the event loop was."""
        self._lag.observe(seconds)

    def page(self) -> tuple[str, bytes]:
        """Return the type and the content of a page of them, for a server that is there anyway."""
        return CONTENT_TYPE_LATEST, generate_latest(self.registry)

    def serve(self, host: str, port: int) -> int | None:
        """Serve them at `port`, or at the next one that is free; return which.

        Where none is, the process goes on without metrics and logs a warning.
        """
        reason = ""
        for one in range(port, min(port + PORTS, 2**16)):
            try:
                self._served = start_http_server(one, host, self.registry)
            except OSError as error:
                reason = str(error)
                if error.errno != errno.EADDRINUSE:  # nor would another port help
                    break
                continue
            log.info("metrics are served at http://%s:%d/metrics", host, one)
            return one
        log.warning(
            "metrics are not served: no port is free at %s from %d on (%s); set metrics_port or"
            " metrics_host",
            *(host, port, reason),
        )
        return None

    def close(self) -> None:
        """Serve no more."""
        if self._served:
            server, thread = self._served
            server.shutdown()
            server.server_close()
            thread.join()
            self._served = None

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, labels, registry=self.registry)


class _Gauges:
    """A gauge with one label, whose values are replaced all together."""

    def __init__(self, gauge: Gauge) -> None:
        self._gauge = gauge
        self._shown: set[str] = set()

    def show(self, values: Mapping[str, float]) -> None:
        """Show `values`, and no others; one that stays is never away, whenever it is scraped."""
        for name in self._shown - values.keys():
            self._gauge.remove(name)
        for name, value in values.items():
            self._gauge.labels(name).set(value)
        self._shown = set(values)


class _Archive(Collector):
    """The gauges of the archive; none where there is no archive."""

    def __init__(self) -> None:
        self._values: Mapping[str, float] = {}

    def show(self, figures: ArchiveFigures | None) -> None:
        """Show these figures from now on."""
        self._values = {name: getattr(figures, name) for name in ARCHIVE} if figures else {}

    def collect(self) -> Iterable[Metric]:
        """Return the gauges that there are."""
        for field, value in self._values.items():
            name, text = ARCHIVE[field]
            yield GaugeMetricFamily(f"stepfleet_{name}", text, value=value)


class _Read(Collector):
    """A counter that is read at each scrape."""

    value: Callable[[], float] = float

    def __init__(self, name: str, text: str) -> None:
        self._given = name, text

    def collect(self) -> Iterable[Metric]:
        """Return the counter with its value of now."""
        yield CounterMetricFamily(*self._given, value=self.value())


class Metrics(FleetMetrics):
    """The metrics of one worker process: also what it did. Children of labels are kept by value.

    To find them through prometheus_client costs three times as much as to count.
    """

    def __init__(self) -> None:
        super().__init__()
        self._held: dict[str, Gauge] = {}
        self._read: dict[str, _Read] = {}
        self._runs = self._counted(
            "stepfleet_runs", "Runs that ended here", "agent", "status", "stop_reason"
        )
        self._steps = self._counted("stepfleet_steps", "Commits of steps", "agent", "move")
        self._refused = self._counted("stepfleet_claims_refused", "Messages without work", "why")
        self._latency = self._seconds(
            "stepfleet_model_seconds", "Seconds of answered model calls", SECONDS, "model"
        )
        self._errors = self._counted(
            "stepfleet_model_errors", "Model calls that failed", "model", "type"
        )
        self._tokens = self._counted(
            "stepfleet_model_tokens", "Tokens of model calls", "model", "kind"
        )
        self._cost = self._counted("stepfleet_cost_usd", "USD that committed steps took", "agent")
        self._cached = self._counted(
            "stepfleet_cached_calls", "Committed steps that the response cache answered", "agent"
        )
        self._tools = self._counted("stepfleet_tool_calls", "Tool calls made", "tool", "status")
        self._took = self._seconds(
            "stepfleet_tool_seconds", "Seconds of tool calls", SECONDS, "tool"
        )
        self._tool_errors = self._counted(
            "stepfleet_tool_errors", "Tool calls that failed, by code", "tool", "code"
        )
        self._failures = self._counted(
            "stepfleet_failures",
            "Failed attempts at steps, and runs that ended at a limit, by cause",
            *("kind", "code", "tool", "model"),
        )
        self._waited = self._seconds(
            "stepfleet_limit_wait_seconds",
            "Waits of steps for limits of the fleet, before their calls",
            *(WAITS, "model"),
        )

    def export(self, observed: Observation) -> None:
        """Count an observation. Belongs to one thread."""
        match observed:
            case StepObservation():
                self._count_step(observed)
                self._count_calls(observed.calls)
            case ToolTaskObservation():
                self._count_calls(observed.calls)
            case RefusalObservation():
                self._refused(observed.why.value).inc()

    def gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Show what `value` returns, at each scrape."""
        if name not in self._held:
            self._held[name] = self._gauge(name, text)
        self._held[name].set_function(value)

    def count(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Show the count that `value` returns, at each scrape."""
        if name not in self._read:
            self._read[name] = _Read(name, text)
            self.registry.register(self._read[name])
        self._read[name].value = value

    def _count_step(self, observed: StepObservation) -> None:
        agent, verdict = observed.claim.config.name, observed.verdict
        if not observed.applied:
            self._steps(agent, "dropped").inc()
            return
        self._steps(agent, verdict.move.value).inc()
        if cause := _cause(verdict, observed.claim.config.model):
            self._failures(*cause).inc()
        if verdict.logged:
            self._cost(agent).inc(verdict.logged.result.cost_usd)
            if verdict.logged.result.waited_seconds:
                model = observed.claim.config.model
                self._waited(model).observe(verdict.logged.result.waited_seconds)
            if verdict.logged.result.cached:
                self._cached(agent).inc()
        if verdict.move is Move.FINISH and verdict.stop_reason:
            status = end_state(verdict.stop_reason).value
            self._runs(agent, status, verdict.stop_reason.value).inc()

    def _count_calls(self, calls: tuple[ModelCallObservation | ToolCallObservation, ...]) -> None:
        for call in calls:
            if isinstance(call, ModelCallObservation):
                self._count_model_call(call)
            else:
                self._count_tool_call(call)

    def _count_model_call(self, call: ModelCallObservation) -> None:
        model = call.request.model
        if call.response:
            self._latency(model).observe((call.ended - call.began) / 1e9)
            if usage := call.response.usage:
                self._tokens(model, "input").inc(usage.prompt_tokens)
                self._tokens(model, "output").inc(usage.completion_tokens)
        elif call.code != CANCELLED:
            self._errors(model, call.kind).inc()

    def _count_tool_call(self, call: ToolCallObservation) -> None:
        tool = call.name or "unknown"
        if call.code == CANCELLED:
            self._tools(tool, "cancelled").inc()
            return
        self._tools(tool, "error" if call.code else "success").inc()
        self._took(tool).observe((call.ended - call.began) / 1e9)
        if call.code:
            self._tool_errors(tool, call.code).inc()

    def _counted(self, name: str, text: str, *labels: str) -> Callable[..., Counter]:
        return cache(self._counter(name, text, *labels).labels)

    def _seconds(
        self, name: str, text: str, buckets: Sequence[float], *labels: str
    ) -> Callable[..., Histogram]:
        made = Histogram(name, text, labels, buckets=buckets, registry=self.registry)
        return cache(made.labels)


def _cause(verdict: Verdict, model: str) -> tuple[str, str, str, str] | None:
    """Return kind, code, tool and model of a failure; None where there is none.

    Never its text, nor a tool's name that the model made up: labels have few values.
    """
    if verdict.failure is not None:
        cause = cause_of(verdict.failure, model)
        tool = "unknown" if cause.code == NOT_FOUND else cause.tool
        return cause.kind, cause.code or "", tool or "", cause.model or ""
    reason = verdict.stop_reason if verdict.move is Move.FINISH else None
    if reason is None or end_state(reason) in (Lifecycle.COMPLETED, Lifecycle.CANCELLED):
        return None
    return reason.value, "", "", model
