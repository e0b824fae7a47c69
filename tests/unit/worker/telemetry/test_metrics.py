"""What metrics count."""

import errno
import logging
import math
from typing import Any

import pytest
from prometheus_client import start_http_server
from support.runs.seen_steps import SECOND, a_model_call, a_tool_call, a_verdict, an_attempt
from support.servers.redis_servers import listener

from stepfleet.orchestrator import ErrorInfo, ErrorType, StopReason
from stepfleet.orchestrator.protocol.claim import Refused
from stepfleet.orchestrator.protocol.verdict import Move
from stepfleet.orchestrator.store.fleet.figures import FleetFigures
from stepfleet.orchestrator.store.limits import LimitState
from stepfleet.orchestrator.version import own_build
from stepfleet.worker.telemetry import metrics as module
from stepfleet.worker.telemetry.metrics import FleetMetrics, Metrics
from stepfleet.worker.telemetry.observations import CANCELLED, RefusalObservation


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


def a_fleet(**given: Any) -> FleetFigures:
    """Return figures that are all 3, but for those that are given, and those that are many."""
    many = {"limits": (), "work": {}, "capacity": {}, "archive": None, **given}
    return FleetFigures.model_validate({**dict.fromkeys(FleetFigures.model_fields, 3), **many})


def value(metrics: FleetMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_runs_are_counted_by_agent_and_end(metrics: Metrics) -> None:
    """OBS-02: those that were committed alone."""
    ended = a_verdict(Move.FINISH, stop_reason=StopReason.STEPS_LIMIT)
    metrics.export(an_attempt(ended))
    metrics.export(an_attempt(ended, applied=False))
    labels = {"agent": "clerk", "status": "stopped", "stop_reason": "steps_limit"}
    assert value(metrics, "stepfleet_runs_total", **labels) == 1
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
    metrics.show_fleet(a_fleet(limits=(limit,), queue_length=None))
    assert value(metrics, "stepfleet_workers") == value(metrics, "stepfleet_overdue_runs") == 3
    assert math.isnan(value(metrics, "stepfleet_queue_length") or 0)
    assert value(metrics, "stepfleet_store_up") == 1
    assert value(metrics, "stepfleet_limit_in_flight", limit="openai:m") == 2
    other = LimitState(name="tenant:t", in_flight=1)
    metrics.show_fleet(a_fleet(limits=(other,)))
    assert value(metrics, "stepfleet_limit_in_flight", limit="openai:m") is None
    assert value(metrics, "stepfleet_limit_in_flight", limit="tenant:t") == 1
    metrics.show_fleet(None)
    assert value(metrics, "stepfleet_limit_in_flight", limit="tenant:t") is None
    assert math.isnan(value(metrics, "stepfleet_workers") or 0)
    assert value(metrics, "stepfleet_store_up") == 0


def test_model_calls_are_timed_and_their_failures_counted_by_type(metrics: Metrics) -> None:
    """OBS-02: one that was broken off is neither."""
    failed = a_model_call(response=None, code="RATE_LIMIT_ERROR", kind="rate_limit")
    broken_off = a_model_call(response=None, code=CANCELLED, kind=CANCELLED)
    metrics.export(an_attempt(a_verdict(), a_model_call(), failed, broken_off))
    refused, ended = ({"model": "openai:gpt", "type": one} for one in ("rate_limit", CANCELLED))
    assert value(metrics, "stepfleet_model_seconds_sum", model="openai:gpt") == 1
    assert value(metrics, "stepfleet_model_seconds_count", model="openai:gpt") == 1
    assert value(metrics, "stepfleet_model_errors_total", **refused) == 1
    assert value(metrics, "stepfleet_model_errors_total", **ended) is None
    assert value(metrics, "stepfleet_model_tokens_total", model="openai:gpt", kind="input") == 7


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("", "TOOL_NOT_FOUND"),
        ("add", "VALIDATION_ERROR"),
        ("add", "INVALID_FUNCTION_CALL"),
        ("add", "TIMEOUT_ERROR"),
    ],
)
def test_a_tools_failure_is_counted_by_its_code(metrics: Metrics, name: str, code: str) -> None:
    """OBS-02: a name that the model made up is no label."""
    metrics.export(an_attempt(a_verdict(), a_tool_call(name=name, code=code)))
    tool = name or "unknown"
    assert value(metrics, "stepfleet_tool_calls_total", tool=tool, status="error") == 1
    assert value(metrics, "stepfleet_tool_errors_total", tool=tool, code=code) == 1


def test_tools_that_ran_and_that_were_broken_off_are_counted(metrics: Metrics) -> None:
    """OBS-02"""
    metrics.export(an_attempt(a_verdict(), a_tool_call(), a_tool_call(code=CANCELLED)))
    assert value(metrics, "stepfleet_tool_calls_total", tool="add", status="success") == 1
    assert value(metrics, "stepfleet_tool_calls_total", tool="add", status="cancelled") == 1
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


def test_each_queue_has_its_work_and_its_capacity(metrics: Metrics) -> None:
    """OPS-02, OPS-06: those of the last reading alone."""
    metrics.show_fleet(a_fleet(work={"stepfleet": 5, "gpu": 2}, capacity={"stepfleet": 50}))
    assert value(metrics, "stepfleet_work", queue="gpu") == 2
    assert value(metrics, "stepfleet_capacity", queue="stepfleet") == 50
    metrics.show_fleet(a_fleet(work={"stepfleet": 6}))
    assert value(metrics, "stepfleet_work", queue="gpu") is None
    assert value(metrics, "stepfleet_work", queue="stepfleet") == 6


def test_a_process_without_steps_has_those_of_the_fleet_alone() -> None:
    """OPS-06: and each says what is installed there."""
    kept, worker = FleetMetrics(), Metrics()
    made, all_made = ({one.name for one in each.registry.collect()} for each in (kept, worker))
    assert made < all_made
    assert {"stepfleet_workers", "stepfleet_rescued", "process_resident_memory_bytes"} <= made
    assert {"stepfleet_runs", "stepfleet_model_seconds", "stepfleet_steps"} <= all_made - made
    build = {"version": own_build().version, "commit": own_build().commit}
    assert value(kept, "stepfleet_build_info", **build) == 1
    kind, page = kept.page()
    assert kind.startswith("text/plain")
    assert b"stepfleet_store_up" in page


def test_counts_that_others_keep_are_counters(metrics: Metrics) -> None:
    metrics.count("stepfleet_telemetry_dropped", "dropped", lambda: 4)
    metrics.count("stepfleet_telemetry_dropped", "dropped", lambda: 5)
    assert value(metrics, "stepfleet_telemetry_dropped_total") == 5


def test_a_host_that_is_none_of_this_machine_is_tried_once(
    metrics: Metrics, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixty-four ports of it would be as many look-ups of its name."""
    tried: list[int] = []

    def serve(port: int, *given: Any) -> Any:
        tried.append(port)
        return start_http_server(port, *given)

    monkeypatch.setattr(module, "start_http_server", serve)
    with caplog.at_level(logging.WARNING):
        assert metrics.serve("192.0.2.1", 9464) is None
    assert tried == [9464]
    assert "metrics_host" in caplog.text


def test_a_worker_without_a_free_port_goes_on_without(
    metrics: Metrics, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OBS-02: and says which settings to change."""
    monkeypatch.setattr(module, "PORTS", 1)
    with listener() as taken, caplog.at_level(logging.WARNING):
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
    with caplog.at_level(logging.WARNING):
        assert metrics.serve("127.0.0.1", 65534) is None
    assert tried == [65534, 65535]
    assert "metrics_port" in caplog.text
