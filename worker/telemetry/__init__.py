"""Logs, metrics and traces of a worker. Nothing here decides anything."""

from stepfleet.worker.telemetry.logs import (
    Identity,
    JsonLines,
    StepLogger,
    current_step,
    log_as_json,
    log_without_secrets,
    step_logger,
)

__all__ = [
    "Identity",
    "JsonLines",
    "StepLogger",
    "current_step",
    "log_as_json",
    "log_without_secrets",
    "step_logger",
]
