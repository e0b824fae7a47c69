"""What metrics count."""

import errno
import logging
import math

import pytest
from support.runs.seen_steps import SECOND, a_model_call, a_tool_call, a_verdict, an_attempt
from support.servers.redis_servers import listener

from stepfleet.orchestrator import ErrorInfo, ErrorType, StopReason
from stepfleet.orchestrator.protocol.claim import Refused
from stepfleet.orchestrator.protocol.verdict import Move
from stepfleet.orchestrator.store.fleet.figures import FleetFigures
from stepfleet.orchestrator.store.limits import LimitState
from stepfleet.worker.telemetry import metrics as module
from stepfleet.worker.telemetry.metrics import Metrics
from stepfleet.worker.telemetry.observations import CANCELLED, RefusalObservation


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_runs_are_counted_by_agent_and_end(metrics: Metrics) -> None:
    """OBS-02: those that were committed alone."""
    ended = a_verdict(Move.FINISH, stop_reason=StopReason.STEPS_LIMIT)
    metrics.export(an_attempt(ended))
    metrics.export(an_attempt(ended, applied=False))
    labels = {"agent": "clerk", "status": "stopped", "stop_reason": "steps_limit"}
    assert value(metrics, "agent_runs_total", **labels) == 1
    assert value(metrics, "stepfleet_steps_total", agent="clerk", move="finish") == 1
    assert value(metrics, "stepfleet_steps_total", agent="clerk", move="dropped") == 1
    assert value(metrics, "stepfleet_cost_usd_total", agent="clerk") == 0.5


def test_failures_are_counted_by_cause_and_never_by_text(metrics: Metrics) -> None:
    tool = ErrorInfo(
        type=ErrorType.TOOL, code="TOOL_EXECUTION_ERROR", message="gadget 17", tool_name="add"
    )
    made_up = ErrorInfo(
        type=ErrorType.TOOL, code="TOOL_NOT_FOUND", message="no such tool", tool_name="made-up"
    )
    for failure in (tool, made_up):
        metrics.export(an_attempt(a_verdict(Move.RETRY, logged=False, failure=failure)))
    stopped = a_verdict(Move.FINISH, stop_reason=StopReason.STEPS_LIMIT)
    metrics.export(an_attempt(stopped))
    metrics.export(an_attempt(a_verdict(Move.FINISH, stop_reason=StopReason.COMPLETED)))
    counted = [
        (sample.labels["kind"], sample.labels["tool"], bool(sample.labels["model"]), sample.value)
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == "stepfleet_failures_total"
    ]
    assert sorted(counted) == [
        ("steps_limit", "", True, 1),
        ("tool", "add", False, 1),
        ("tool", "unknown", False, 1),
    ]


def test_the_fleets_figures_are_unknown_while_the_store_is_away(metrics: Metrics) -> None:
    limit = LimitState(name="openai:m", waiting=3, in_flight=2)
    given = {**dict.fromkeys(FleetFigures.model_fields, 3), "limits": (limit,), "work": {}}
    given["capacity"] = {}
    metrics.show_fleet(FleetFigures.model_validate({**given, "queue_length": None}))
    assert value(metrics, "stepfleet_workers") == value(metrics, "stepfleet_overdue_runs") == 3
    assert math.isnan(value(metrics, "stepfleet_queue_length") or 0)
    assert value(metrics, "stepfleet_store_up") == 1
    assert value(metrics, "stepfleet_limit_in_flight", limit="openai:m") == 2
    metrics.show_fleet(None)
    assert value(metrics, "stepfleet_limit_in_flight", limit="openai:m") is None
    assert math.isnan(value(metrics, "stepfleet_workers") or 0)
    assert value(metrics, "stepfleet_store_up") == 0


def test_model_calls_are_timed_and_their_failures_counted_by_type(metrics: Metrics) -> None:
    """OBS-02: one that was broken off is neither."""
    failed = a_model_call(response=None, code="RATE_LIMIT_ERROR", kind="rate_limit")
    broken_off = a_model_call(response=None, code=CANCELLED, kind=CANCELLED)
    metrics.export(an_attempt(a_verdict(), a_model_call(), failed, broken_off))
    assert value(metrics, "llm_latency_sum", model="openai:gpt") == 1
    assert value(metrics, "llm_latency_count", model="openai:gpt") == 1
    assert value(metrics, "llm_errors_total", model="openai:gpt", type="rate_limit") == 1
    assert value(metrics, "llm_errors_total", model="openai:gpt", type=CANCELLED) is None
    assert value(metrics, "llm_tokens_total", model="openai:gpt", kind="input") == 7


@pytest.mark.parametrize(
    ("name", "code", "counter", "labels"),
    [
        ("", "TOOL_NOT_FOUND", "tool_not_found_errors", {}),
        ("add", "VALIDATION_ERROR", "tool_not_executable_errors", {"tool": "add"}),
        ("add", "INVALID_FUNCTION_CALL", "tool_not_executable_errors", {"tool": "add"}),
        (
            "add",
            "TIMEOUT_ERROR",
            "tool_execution_errors",
            {"tool": "add", "code": "TIMEOUT_ERROR"},
        ),
    ],
)
def test_a_tools_failure_is_counted_as_what_it_is(
    metrics: Metrics, name: str, code: str, counter: str, labels: dict[str, str]
) -> None:
    """OBS-02: a name that the model made up is no label."""
    metrics.export(an_attempt(a_verdict(), a_tool_call(name=name, code=code)))
    tool = name or "unknown"
    assert value(metrics, "tool_executions_total", tool=tool, status="error") == 1
    assert value(metrics, f"{counter}_total", **labels) == 1
    counted = ("tool_not_found_errors", "tool_not_executable_errors", "tool_execution_errors")
    found = [
        sample.name
        for family in metrics.registry.collect()
        if family.name in counted
        for sample in family.samples
        if sample.name.endswith("_total") and sample.value
    ]
    assert found == [f"{counter}_total"]


def test_tools_that_ran_and_that_were_broken_off_are_counted(metrics: Metrics) -> None:
    """OBS-02"""
    metrics.export(an_attempt(a_verdict(), a_tool_call(), a_tool_call(code=CANCELLED)))
    assert value(metrics, "tool_executions_total", tool="add", status="success") == 1
    assert value(metrics, "tool_executions_total", tool="add", status="cancelled") == 1
    assert value(metrics, "stepfleet_tool_seconds_sum", tool="add") == SECOND / 1e9


def test_refusals_rescues_lag_and_what_is_in_flight_are_shown(metrics: Metrics) -> None:
    """OBS-02"""
    metrics.export(RefusalObservation(Refused.LEASED))
    metrics.rescued(3)
    metrics.observe_lag(0.02)
    held = [1, 2]
    metrics.gauge("stepfleet_steps_in_flight", "held", lambda: len(held))
    assert value(metrics, "stepfleet_steps_in_flight") == 2
    metrics.gauge("stepfleet_steps_in_flight", "held", lambda: 7)
    assert value(metrics, "stepfleet_steps_in_flight") == 7
    assert value(metrics, "stepfleet_claims_refused_total", why="leased") == 1
    assert value(metrics, "stepfleet_rescued_total") == 3
    assert value(metrics, "stepfleet_loop_lag_seconds_sum") == 0.02


def test_a_worker_without_a_free_port_goes_on_without(
    metrics: Metrics, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OBS-02: and says which settings to change."""
    monkeypatch.setattr(module, "PORTS", 1)
    with listener() as taken, caplog.at_level(logging.ERROR):
        assert metrics.serve("127.0.0.1", taken.getsockname()[1]) is None
    assert "metrics_port" in caplog.text
    metrics.close()


def test_no_port_beyond_the_last_one_is_tried(
    metrics: Metrics, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be another error than that of a port that is taken."""
    tried: list[int] = []

    def refuse(port: int, *_: object) -> None:
        tried.append(port)
        raise OSError(errno.EADDRINUSE, "Address already in use")

    monkeypatch.setattr(module, "start_http_server", refuse)
    with caplog.at_level(logging.ERROR):
        assert metrics.serve("127.0.0.1", 65534) is None
    assert tried == [65534, 65535]
    assert "metrics_port" in caplog.text
