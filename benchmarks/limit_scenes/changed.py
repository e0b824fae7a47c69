"""A limit that the service halves, then doubles, while a fleet that has to learn it is at work."""

import itertools
import json
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loads import Running, lines
from processes import until

from limit_scenes.service_log import BURST, MINUTE, Call, calls_of
from stepfleet import Agent

PHASES = ((30.0, 1.0), (60.0, 0.5), (100.0, 1.0))
"""Seconds, and the share of the allowance in them."""
WINDOW, BACK, FEW = 10.0, 0.95, 0.05
STEPS = 5
LONGEST = 3600.0


def measure(on: Running, agent: Agent, rpm: float, log: Path) -> dict[str, Any]:
    """Return the seconds after which 95% of the new allowance are used, refusals, failed runs."""
    runs = round(sum(seconds * share for seconds, share in PHASES) * rpm / MINUTE / STEPS)
    batch, changes = on.client.submit_batch(lines(runs, STEPS), agent=agent), list[float]()
    for (seconds, _), (_, share) in itertools.pairwise(PHASES):
        time.sleep(seconds)
        changes.append(_set_limit(on, rpm * share))
    until(lambda: batch.progress().done == runs, within=LONGEST)
    calls, (halved, doubled) = calls_of(log), changes
    return {
        "runs": runs,
        "failed": runs - batch.progress().completed,
        "halved": _back_after([one for one in calls if one.at <= doubled], halved, rpm / 2),
        "doubled": _back_after(calls, doubled, rpm),
        "refused": sum(call.refused for call in calls) / len(calls),
        "calls": len(calls),
        "by_window": _by_window(calls, rpm),
    }


def _by_window(calls: Sequence[Call], per_minute: float) -> list[tuple[float, float]]:
    """Return for each window the share of the whole allowance used, and the share refused."""
    windows: dict[int, list[bool]] = {}
    for call in calls:
        windows.setdefault(int((call.at - calls[0].at) // WINDOW), []).append(call.refused)
    whole = per_minute * WINDOW / MINUTE
    return [
        (round(refused.count(False) / whole, 3), round(sum(refused) / len(refused), 3))
        for _, refused in sorted(windows.items())
    ]


def _set_limit(on: Running, per_minute: float) -> float:
    body = json.dumps({"requests": per_minute, "burst": BURST}).encode()
    url = f"{on.model.url.removesuffix('/v1')}/limits"
    request = urllib.request.Request(url, body, method="PUT")  # noqa: S310 - our own server
    with urllib.request.urlopen(request) as answer:  # noqa: S310
        answer.read()
    return time.monotonic()


def _back_after(calls: Sequence[Call], since: float, per_minute: float) -> float:
    """Return the seconds until a window uses the allowance with few refusals; inf for never."""
    wanted, last = BACK * per_minute * WINDOW / MINUTE, calls[-1].at - WINDOW
    for begin in (since + step / 2 for step in range(int(2 * max(last - since, 0)) + 1)):
        window = [call for call in calls if begin < call.at <= begin + WINDOW]
        refused = sum(call.refused for call in window)
        if len(window) - refused >= wanted and refused <= FEW * len(window):
            return begin - since
    return float("inf")
