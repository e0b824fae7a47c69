"""Derives trace and span ids from run ids, so that every worker computes the same. Pure.

A run's trace id is its own id, a UUID of the same 128 bits: all workers agree on it, and nothing
has to travel with messages or be stored.
"""

import hashlib
import secrets
from collections.abc import Mapping
from uuid import UUID

_LARGEST = 2**64


def trace_id(run_id: str) -> int:
    """Return the trace id of a run: its UUID as a number."""
    try:
        return UUID(run_id).int or 1
    except ValueError:
        return int.from_bytes(hashlib.blake2b(run_id.encode(), digest_size=16).digest()) or 1


def run_span_id(run_id: str, execution: int = 1) -> int:
    """Return the id of the span of a run's execution, the parent of its steps."""
    return _derived(run_id, "run", execution)


def step_span_id(run_id: str, execution: int, step: int) -> int:
    """Return the id of the span of a step (from 1) that waits for tool calls elsewhere."""
    return _derived(run_id, "step", execution, step)


def new_span_id() -> int:
    """Return an id for any other span."""
    return secrets.randbits(64) or 1


def sampled_part(environment: Mapping[str, str]) -> float:
    """Return which part of all runs is traced, 0 to 1, as `OTEL_TRACES_SAMPLER` says."""
    sampler = (
        environment.get("OTEL_TRACES_SAMPLER", "").strip().lower().removeprefix("parentbased_")
    )
    if sampler == "always_off":
        return 0.0
    if sampler != "traceidratio":
        return 1.0
    try:
        return float(environment.get("OTEL_TRACES_SAMPLER_ARG", "1"))
    except ValueError:
        return 1.0


def is_sampled(run_id: str, part: float) -> bool:
    """Return whether a run is among the traced `part` of all, equally on every worker."""
    return part >= 1 or _derived(run_id, "sample") < part * _LARGEST


def _derived(*parts: object) -> int:
    text = " ".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) or 1
