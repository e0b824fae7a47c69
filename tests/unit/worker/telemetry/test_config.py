"""When spans and metrics are made, and what is said where they cannot be."""

import logging
import subprocess
import sys

import pytest

from stepfleet.orchestrator import ConfigurationError, Settings
from stepfleet.orchestrator.settings.settings import load_settings
from stepfleet.worker.telemetry import instrumentation as config
from stepfleet.worker.telemetry.instrumentation import TelemetryConfig, available, telemetry_config

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}


def asked(environment: dict[str, str] | None = None, **settings: object) -> TelemetryConfig:
    return telemetry_config(Settings(**settings), environment or {})  # type: ignore[arg-type]


def served(**settings: object) -> TelemetryConfig:
    """Return what a worker of a fleet makes."""
    return telemetry_config(Settings(**settings), {}, serves=True)  # type: ignore[arg-type]


def test_a_fleets_workers_serve_metrics_by_default_and_nothing_else_is_wanted() -> None:
    """OBS-01, OBS-02, OPS-06: no port is opened in a program that executes steps itself."""
    assert not asked()
    assert served() == TelemetryConfig(port=9464, host="127.0.0.1")
    assert not served(metrics_port=0)
    assert not served(telemetry="off")


@pytest.mark.parametrize(
    "environment", [ENDPOINT, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:1/x"}]
)
def test_an_endpoint_in_the_environment_asks_for_spans(environment: dict[str, str]) -> None:
    """OBS-01"""
    assert asked(environment).spans
    assert not asked(environment, telemetry="off")
    assert not asked({**environment, "OTEL_SDK_DISABLED": "TRUE"})
    assert not asked({**environment, "OTEL_TRACES_EXPORTER": "none"})


def test_a_setting_asks_for_spans_without_an_endpoint() -> None:
    """OBS-01: the exporter's own default is a collector on this machine."""
    assert asked(telemetry="on").spans
    assert asked(telemetry="on").port is None


def test_a_port_asks_for_metrics_on_loopback() -> None:
    """OBS-02"""
    assert asked(metrics_port=9500) == TelemetryConfig(port=9500, host="127.0.0.1", asked=True)
    assert served(metrics_port=9500) == asked(metrics_port=9500)
    assert asked(metrics_port=9464, metrics_host="0.0.0.0").host == "0.0.0.0"  # noqa: S104
    assert not asked(metrics_port=9464, telemetry="off")


def test_a_port_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="'metrics_port'"):
        load_settings(metrics_port=70000)
    with pytest.raises(ConfigurationError, match="'metrics_port'"):
        load_settings(metrics_port=-1)


def test_a_missing_library_is_an_error_where_we_were_asked_and_a_warning_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(config, "find_spec", lambda _: None)
    with pytest.raises(ConfigurationError, match=r"metrics_port is set.*stepfleet\[telemetry\]"):
        available(asked(metrics_port=9464))
    with pytest.raises(ConfigurationError, match=r"telemetry is on.*stepfleet\[telemetry\]"):
        available(asked(telemetry="on"))
    with caplog.at_level(logging.WARNING):
        assert not available(asked(ENDPOINT))
        assert not available(served())
    assert "no spans are sent" in caplog.text


def test_a_protocol_that_workers_do_not_speak_is_named_with_the_fix(
    caplog: pytest.LogCaptureFixture,
) -> None:
    grpc = {**ENDPOINT, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
    with pytest.raises(ConfigurationError, match="http/protobuf"):
        available(asked(grpc, telemetry="on"))
    with caplog.at_level(logging.WARNING):
        assert available(asked(grpc, metrics_port=9464)) == TelemetryConfig(
            port=9464, host="127.0.0.1", asked=True, protocol="grpc"
        )
    assert "http/protobuf" in caplog.text
    own = {**grpc, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
    assert available(asked(own)).spans


SWITCHED_OFF = """
import asyncio, sys
from stepfleet.orchestrator.settings.settings import Settings
from stepfleet.worker.runtime.worker import Worker
from stepfleet.worker.telemetry.instrumentation import import_exporters, instrument
from stepfleet.worker.toolbox.threads import ToolThreads

settings = Settings(redis_url="redis://127.0.0.1:1/0", metrics_port=0)
import_exporters(settings)
around = instrument(settings, "w", {})
assert around.observers() == ()
assert type(around.toolbox(ToolThreads(1))).__name__ == "LocalToolbox"
assert type(around.models()).__name__ == "Models"
assert around.background(float, float, None) == []
asyncio.run(around.aclose())
print([name for name in sys.modules if name.startswith(("prometheus_client",
       "opentelemetry.exporter", "opentelemetry.sdk.trace", "stepfleet.worker.telemetry.spans",
       "stepfleet.worker.telemetry.metrics"))])
"""


def test_where_nothing_is_wanted_nothing_is_imported_and_nothing_stands_in_between() -> None:
    """OBS-07: the step's path is free of it."""
    done = subprocess.run(
        [sys.executable, "-c", SWITCHED_OFF],
        env={},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
