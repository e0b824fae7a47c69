"""Whether a worker makes spans and metrics, as its settings and OpenTelemetry's variables say.

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
class Wanted:
    """What is wanted; `port` is None where no metrics are. Traces are sent by `protocol`."""

    spans: bool = False
    port: int | None = None
    host: str = ""
    protocol: str = ""
    explicit: bool = False

    def __bool__(self) -> bool:
        """Tell whether anything is wanted."""
        return self.spans or self.port is not None


def wanted(settings: Settings, environment: Mapping[str, str]) -> Wanted:
    """Return what settings and environment ask for. By default nothing."""
    if settings.telemetry == "off":
        return Wanted()
    told = {name: text.strip() for name, text in environment.items() if name.startswith("OTEL_")}
    disabled = (
        told.get("OTEL_SDK_DISABLED", "").lower() == "true"
        or told.get("OTEL_TRACES_EXPORTER") == "none"
    )
    explicit = settings.telemetry == "on"
    asked = explicit or any(told.get(name) for name in ENDPOINTS)
    protocol = next((told[name] for name in PROTOCOLS if told.get(name)), "")
    return Wanted(
        spans=asked and not disabled,
        port=settings.metrics_port,
        host=settings.metrics_host,
        protocol=protocol,
        explicit=explicit,
    )


def possible(asked: Wanted) -> Wanted:
    """Return what can be had of it here.

    Raises `ConfigurationError` where something is missing that a setting of ours asks for. Of
    OpenTelemetry's variables, which may be meant for others in the same environment, a warning.
    """
    if asked.port is not None and not _is_installed("prometheus_client"):
        raise ConfigurationError(f"metrics_port is set, and prometheus_client is missing: {FIX}")
    trouble = _trouble(asked) if asked.spans else ""
    if trouble and asked.explicit:
        raise ConfigurationError(f"telemetry is on, and {trouble}")
    if trouble:
        log.warning("no spans are sent: %s, or set STEPFLEET_TELEMETRY=off", trouble)
        return Wanted(port=asked.port, host=asked.host)
    return asked


def _trouble(asked: Wanted) -> str:
    if not _is_installed("opentelemetry.exporter.otlp.proto.http"):
        return f"OpenTelemetry's exporter is missing: {FIX}"
    if asked.protocol == "grpc":
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
