"""Whether a worker makes spans and metrics, by its settings and OpenTelemetry's variables.

Imports nothing of what it decides about.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec

from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.settings.settings import Settings

log = logging.getLogger(__name__)

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
FIX = "install stepfleet[telemetry]"


@dataclass(frozen=True, slots=True)
class TelemetryConfig:
    """Which telemetry to make; `port` is None without metrics. Traces are sent by `protocol`."""

    spans: bool = False
    port: int | None = None
    host: str = ""
    protocol: str = ""
    explicit: bool = False

    def __bool__(self) -> bool:
        """Return whether any telemetry is wanted."""
        return self.spans or self.port is not None


def telemetry_config(settings: Settings, environment: Mapping[str, str]) -> TelemetryConfig:
    """Return what settings and environment ask for. By default nothing."""
    if settings.telemetry == "off":
        return TelemetryConfig()
    variables = {
        name: environment[name].strip() for name in environment if name.startswith("OTEL_")
    }
    disabled = (
        variables.get("OTEL_SDK_DISABLED", "").lower() == "true"
        or variables.get("OTEL_TRACES_EXPORTER") == "none"
    )
    explicit = settings.telemetry == "on"
    spans = explicit or any(variables.get(name) for name in ENDPOINTS)
    protocol = next((variables[name] for name in PROTOCOLS if variables.get(name)), "")
    return TelemetryConfig(
        spans=spans and not disabled,
        port=settings.metrics_port,
        host=settings.metrics_host,
        protocol=protocol,
        explicit=explicit,
    )


def available(config: TelemetryConfig) -> TelemetryConfig:
    """Return the part of `config` that this installation can provide.

    Raises `ConfigurationError` where something is missing that a setting of ours asks for. Of
    OpenTelemetry's variables, which may be meant for others in the same environment, a warning.
    """
    if config.port is not None and not _is_installed("prometheus_client"):
        raise ConfigurationError(f"metrics_port is set, and prometheus_client is missing: {FIX}")
    reason = _why_not(config) if config.spans else ""
    if reason and config.explicit:
        raise ConfigurationError(f"telemetry is on, and {reason}")
    if reason:
        log.warning("no spans are sent: %s, or set STEPFLEET_TELEMETRY=off", reason)
        return TelemetryConfig(port=config.port, host=config.host)
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
