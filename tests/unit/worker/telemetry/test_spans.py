"""Spans as OpenTelemetry's SDK has them."""

import asyncio
from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanContext, SpanKind, StatusCode
from support.runs.seen_steps import (
    BEGAN,
    RUN,
    SECOND,
    a_model_call,
    a_tool_call,
    a_verdict,
    an_attempt,
)

from stepfleet.orchestrator import StopReason
from stepfleet.orchestrator.protocol.verdict import Move
from stepfleet.worker.telemetry.observations import CANCELLED
from stepfleet.worker.telemetry.span_plans import run_span_id, trace_id
from stepfleet.worker.telemetry.spans import Spans

FINISH = a_verdict(Move.FINISH, stop_reason=StopReason.COMPLETED)


def ids(span: ReadableSpan) -> SpanContext:
    known = span.get_span_context()
    assert known is not None
    return known


class Kept:
    """Spans that go into memory."""

    def __init__(self, **environment: str) -> None:
        self._exporter = InMemorySpanExporter()
        self.spans = Spans("host:1", SimpleSpanProcessor(self._exporter), environment)

    @property
    def text(self) -> tuple[ReadableSpan, ...]:
        return self._exporter.get_finished_spans()


@pytest.fixture
def kept() -> Iterator[Kept]:
    made = Kept()
    yield made
    made.spans.close()


def test_a_run_is_exported_as_one_trace(kept: Kept) -> None:
    """OBS-01, RUN-01: ids, times, kinds and parents as planned."""
    kept.spans.export(an_attempt(FINISH, a_model_call(), a_tool_call()))
    model, tool, step, run = kept.text
    assert [one.name for one in kept.text] == [
        "llm_generate",
        "tool_execution",
        "step_1",
        "agent_run",
    ]
    assert {ids(one).trace_id for one in kept.text} == {trace_id(RUN)}
    assert ids(run).span_id == run_span_id(RUN)
    assert run.parent is None
    assert step.parent
    assert step.parent.span_id == run_span_id(RUN)
    assert model.parent
    assert model.parent.span_id == ids(step).span_id
    assert (model.start_time, model.end_time) == (BEGAN, BEGAN + SECOND)
    assert (model.kind, tool.kind) == (SpanKind.CLIENT, SpanKind.INTERNAL)
    assert run.status.status_code is StatusCode.UNSET


def test_failures_have_error_status_and_interruptions_do_not(kept: Kept) -> None:
    """OBS-01"""
    failed = a_tool_call(code="TOOL_EXECUTION_ERROR")
    kept.spans.export(an_attempt(a_verdict(), failed, a_tool_call(span_id=13, code=CANCELLED)))
    first, second, _ = kept.text
    assert first.status.status_code is StatusCode.ERROR
    assert first.status.description == "TOOL_EXECUTION_ERROR"
    assert second.status.status_code is StatusCode.UNSET
    assert second.attributes
    assert second.attributes["error.type"] == CANCELLED


async def test_spans_of_users_stand_below_the_tool_they_are_made_in(kept: Kept) -> None:
    """OBS-01: also behind an await, and apart from other calls at the same time."""

    async def tool(span_id: int) -> int | None:
        with kept.spans.inside(RUN, span_id):
            await asyncio.sleep(0)
            return trace.get_current_span().get_span_context().span_id

    assert list(await asyncio.gather(tool(5), tool(6))) == [5, 6]
    assert not trace.get_current_span().get_span_context().is_valid


def test_of_a_run_that_is_not_sampled_nothing_is_exported() -> None:
    """OBS-03"""
    none = Kept(OTEL_TRACES_SAMPLER="always_off")
    none.spans.export(an_attempt(FINISH, a_model_call()))
    with none.spans.inside(RUN, 5):
        assert not trace.get_current_span().get_span_context().trace_flags.sampled
    assert none.text == ()


@pytest.mark.parametrize(
    ("environment", "service"),
    [
        ({}, "stepfleet-worker"),
        ({"OTEL_SERVICE_NAME": "lamps"}, "lamps"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=shop,team=a"}, "shop"),
    ],
)
def test_the_service_has_the_name_that_the_environment_gives(
    environment: dict[str, str], service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    named = Kept(**environment)
    named.spans.export(an_attempt(a_verdict()))
    assert named.text[0].resource.attributes["service.name"] == service
    assert named.text[0].resource.attributes["service.instance.id"] == "host:1"
