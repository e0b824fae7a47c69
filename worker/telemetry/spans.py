"""Spans by OpenTelemetry's SDK, sent in batches to an OTLP collector over HTTP.

The only module that imports OpenTelemetry; imported where spans are wanted. A collector that is
away costs what it would have got, never a step.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import context, trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
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

from stepfleet.worker.telemetry.observations import Observation
from stepfleet.worker.telemetry.span_plans import (
    SpanPlan,
    is_failure,
    is_sampled,
    run_span_id,
    sampled_part,
    spans_of,
    trace_id,
)

SERVICE = "stepfleet-worker"
_SCOPE = InstrumentationScope("stepfleet")
_WELL = Status(StatusCode.UNSET)
_SAMPLED, _NOT = TraceFlags(TraceFlags.SAMPLED), TraceFlags(TraceFlags.DEFAULT)


class Spans:
    """Makes spans of observations for `processor`, which sends them in batches to a collector."""

    def __init__(
        self,
        worker: str,
        processor: SpanProcessor | None = None,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self._part = sampled_part(environment)
        self._provider = TracerProvider(
            sampler=ParentBased(ALWAYS_ON),
            resource=_resource(worker, environment),
            shutdown_on_exit=False,
        )
        self._processor = processor or BatchSpanProcessor(OTLPSpanExporter())
        self._provider.add_span_processor(self._processor)

    def serve_the_process(self) -> None:
        """Export the spans that tools make by OpenTelemetry's API, unless they have a provider."""
        if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
            trace.set_tracer_provider(self._provider)

    def export(self, observed: Observation) -> None:
        """Make the spans of an observation. Belongs to one thread."""
        for plan in spans_of(observed):
            if is_sampled(plan.run_id, self._part):
                self._make(plan)

    @contextmanager
    def inside(self, run_id: str, span_id: int) -> Iterator[None]:
        """Make a span of that run the parent of spans in this block; it is exported at its end."""
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
        # Made whole, as its work is over: the SDK's tracer, which lets a span grow and gives it an
        # id of its own, takes many times as long.
        attributes = dict(plan.attributes)
        if plan.error:
            attributes["error.type"] = plan.error
        failed = is_failure(plan)
        self._processor.on_end(
            ReadableSpan(
                plan.name,
                context=_context(plan.run_id, plan.span_id, is_remote=False),
                parent=_context(plan.run_id, plan.parent_id) if plan.parent_id else None,
                resource=self._provider.resource,
                attributes=attributes,
                links=[Link(_context(run_id, run_span_id(run_id))) for run_id in plan.links],
                kind=SpanKind.CLIENT if plan.is_call else SpanKind.INTERNAL,
                status=Status(StatusCode.ERROR, plan.error) if failed else _WELL,
                start_time=plan.began,
                end_time=max(plan.began, plan.ended),
                instrumentation_scope=_SCOPE,
            )
        )


def _context(
    run_id: str, span_id: int, *, is_sampled: bool = True, is_remote: bool = True
) -> SpanContext:
    return SpanContext(trace_id(run_id), span_id, is_remote, _SAMPLED if is_sampled else _NOT)


def _below(run_id: str, span_id: int, *, is_sampled: bool) -> context.Context:
    span = NonRecordingSpan(_context(run_id, span_id, is_sampled=is_sampled))
    return set_span_in_context(span, context.Context())


def _resource(worker: str, environment: Mapping[str, str]) -> Resource:
    """Return the sender's identity: the environment's names win over our own."""
    attributes = environment.get("OTEL_RESOURCE_ATTRIBUTES", "")
    named = "OTEL_SERVICE_NAME" in environment or f"{SERVICE_NAME}=" in attributes
    own = {SERVICE_INSTANCE_ID: worker}
    return Resource.create(own if named else {SERVICE_NAME: SERVICE, **own})
