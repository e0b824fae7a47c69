"""Spans by OpenTelemetry's SDK, sent in batches to an OTLP collector over HTTP.

The only module that imports OpenTelemetry; imported where spans are wanted. A collector that is
away costs what it would have got, never a step.
"""

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import context, trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator, RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from stepfleet.worker.telemetry.seen import Seen
from stepfleet.worker.telemetry.span_plans import SpanPlan, is_failure, spans_of
from stepfleet.worker.telemetry.trace_ids import (
    is_sampled,
    run_span_id,
    sampled_part,
    trace_id,
)

SERVICE = "stepfleet-worker"


class PlannedIds(IdGenerator):
    """Gives the span that this thread makes next its planned ids, and all others random ones."""

    def __init__(self) -> None:
        self._random = RandomIdGenerator()
        self._planned = threading.local()

    def plan(self, run_id: str, span_id: int) -> None:
        """Set the ids of the span that this thread makes next."""
        self._planned.ids = trace_id(run_id), span_id

    def generate_span_id(self) -> int:
        """Return the id of a new span."""
        planned = getattr(self._planned, "ids", None)
        self._planned.ids = None
        return planned[1] if planned else self._random.generate_span_id()

    def generate_trace_id(self) -> int:
        """Return the id of a new trace; asked for before the span's."""
        planned = getattr(self._planned, "ids", None)
        return planned[0] if planned else self._random.generate_trace_id()


class Spans:
    """Makes spans of what was seen, and hands them to `processor`: in batches to a collector."""

    def __init__(
        self,
        worker: str,
        processor: SpanProcessor | None = None,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self._part = sampled_part(environment)
        self._ids = PlannedIds()
        self._provider = TracerProvider(
            sampler=ParentBased(ALWAYS_ON),
            resource=_resource(worker, environment),
            shutdown_on_exit=False,
            id_generator=self._ids,
        )
        self._provider.add_span_processor(processor or BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("stepfleet")

    def serve_the_process(self) -> None:
        """Let spans that tools make by OpenTelemetry's API come here, if nobody else has them."""
        if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
            trace.set_tracer_provider(self._provider)

    def take(self, seen: Seen) -> None:
        """Make the spans of what was seen. Belongs to one thread."""
        for plan in spans_of(seen):
            if is_sampled(plan.run_id, self._part):
                self._make(plan)

    @contextmanager
    def inside(self, run_id: str, span_id: int) -> Iterator[None]:
        """Let spans made in here stand below one of that run, which is told when it is over."""
        below = _below(run_id, span_id, is_sampled=is_sampled(run_id, self._part))
        token = context.attach(below)
        try:
            yield
        finally:
            context.detach(token)

    def close(self) -> None:
        """Send what waits, and end. Blocks; how long, the collector decides."""
        self._provider.shutdown()

    def _make(self, plan: SpanPlan) -> None:
        above = context.Context()
        if plan.parent_id is not None:
            above = _below(plan.run_id, plan.parent_id)
        self._ids.plan(plan.run_id, plan.span_id)
        failed = is_failure(plan)
        attributes = dict(plan.attributes)
        if plan.error:
            attributes["error.type"] = plan.error
        span = self._tracer.start_span(
            plan.name,
            context=above,
            kind=SpanKind.CLIENT if plan.is_call else SpanKind.INTERNAL,
            attributes=attributes,
            links=[Link(_context(run_id, run_span_id(run_id))) for run_id in plan.links],
            start_time=plan.began,
        )
        if failed:
            span.set_status(Status(StatusCode.ERROR, plan.error))
        span.end(max(plan.began, plan.ended))


def _context(run_id: str, span_id: int, *, is_sampled: bool = True) -> SpanContext:
    flags = TraceFlags(TraceFlags.SAMPLED if is_sampled else TraceFlags.DEFAULT)
    return SpanContext(trace_id(run_id), span_id, is_remote=True, trace_flags=flags)


def _below(run_id: str, span_id: int, *, is_sampled: bool = True) -> context.Context:
    span = NonRecordingSpan(_context(run_id, span_id, is_sampled=is_sampled))
    return set_span_in_context(span, context.Context())


def _resource(worker: str, environment: Mapping[str, str]) -> Resource:
    """Return who sends: what the environment says of it comes before our own names."""
    told = environment.get("OTEL_RESOURCE_ATTRIBUTES", "")
    named = "OTEL_SERVICE_NAME" in environment or f"{SERVICE_NAME}=" in told
    own = {SERVICE_INSTANCE_ID: worker}
    return Resource.create(own if named else {SERVICE_NAME: SERVICE, **own})
