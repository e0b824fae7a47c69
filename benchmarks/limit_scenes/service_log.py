"""The calls in a service's log: how much of an allowance they used, and how many it refused."""

import bisect
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BURST = 2.0
"""Seconds of the allowance that the service admits at once."""
MINUTE = 60.0
WARM_UP = 2.0
MOST = 0.9


@dataclass(frozen=True)
class Call:
    """A model call as the service saw it: when (seconds), whether it was refused, its tokens."""

    at: float
    refused: bool
    tokens: int


def calls_of(log: Path) -> list[Call]:
    """Return the calls in the service's log, by time."""
    with log.open(encoding="utf-8") as file:
        entries = [json.loads(line) for line in file]
    calls = [
        Call(
            entry["received"],
            entry["limited"] is not None,
            (entry["prompt_tokens"] or 0) + (entry["completion_tokens"] or 0),
        )
        for entry in entries
    ]
    return sorted(calls, key=lambda call: call.at)


def figures(calls: Sequence[Call], per_minute: float, *, tokens: bool = False) -> dict[str, Any]:
    """Return use, refusals and overshoot of an allowance per minute."""
    admitted = [call for call in calls if not call.refused]
    weights = [call.tokens if tokens else 1 for call in admitted]
    begin_at = admitted[0].at + WARM_UP
    end_at = admitted[int(len(admitted) * MOST) - 1].at
    used = sum(
        weight
        for call, weight in zip(admitted, weights, strict=True)
        if begin_at < call.at <= end_at
    )
    typical = sum(weights) / len(weights)
    arrivals = [call.at for call in calls]
    window = min(MINUTE, arrivals[-1] - arrivals[0])
    most = max(
        bisect.bisect_right(arrivals, at + window) - number for number, at in enumerate(arrivals)
    )
    allowed = per_minute * (window + BURST) / MINUTE
    return {
        "used": used / (per_minute * (end_at - begin_at) / MINUTE),
        "whole": sum(weights) / (per_minute * (admitted[-1].at - admitted[0].at + BURST) / MINUTE),
        "refused": sum(call.refused for call in calls) / len(calls),
        "overshoot": most * typical / allowed - 1,
        "calls": len(calls),
    }
