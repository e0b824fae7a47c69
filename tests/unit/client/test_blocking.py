"""The blocking fleet offers what the asynchronous one does, with the same signatures and texts."""

import inspect
from typing import Any

import pytest

from stepfleet.orchestrator import (
    AsyncBatch,
    AsyncFleet,
    AsyncFleetBatches,
    AsyncFleetCache,
    AsyncFleetHistory,
    AsyncFleetRuns,
    Batch,
    Fleet,
    FleetBatches,
    FleetCache,
    FleetHistory,
    FleetRuns,
)

ONLY_ASYNCHRONOUS = {"aclose", "forget"}
ONLY_BLOCKING = {"close", "is_new", "skipped", "skipped_count"}
OWN_GENERATORS = {"debug"}
"""Generators of their own: one yields to a loop, the other to its caller."""
PAIRS = [
    (AsyncBatch, Batch),
    (AsyncFleet, Fleet),
    (AsyncFleetBatches, FleetBatches),
    (AsyncFleetCache, FleetCache),
    (AsyncFleetHistory, FleetHistory),
    (AsyncFleetRuns, FleetRuns),
]


def public(cls: type[Any]) -> dict[str, Any]:
    return {name: one for name, one in vars(cls).items() if not name.startswith("_")}


@pytest.mark.parametrize(("asynchronous", "blocking"), PAIRS)
def test_every_method_is_there_with_its_signature_and_docstring(
    asynchronous: type[Any], blocking: type[Any]
) -> None:
    """LLM-16"""
    ours, theirs = public(blocking), public(asynchronous)
    assert ours.keys() - ONLY_BLOCKING == theirs.keys() - ONLY_ASYNCHRONOUS
    for name in ours.keys() - ONLY_BLOCKING:
        assert ours[name].__doc__ == theirs[name].__doc__
        if inspect.isfunction(theirs[name]):
            mine, its = inspect.signature(ours[name]), inspect.signature(theirs[name])
            if name in OWN_GENERATORS:
                mine, its = (one.replace(return_annotation=None) for one in (mine, its))
            assert mine == its
