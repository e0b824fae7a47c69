"""Latencies of simulated model calls: constant, even, log-normal, with a tail. Pure."""

import math
from dataclasses import dataclass
from random import Random
from typing import Self

from stepfleet.orchestrator.errors import ConfigurationError

FORMS = (
    "0.5 (always), 0.2-1.5 (evenly), p50=1,p99=8 (log-normal); with ,tail=0.02:30 so large a "
    "share takes 30 s instead"
)
_Z99 = 2.3263478740408408
"""Standard deviations from the median to the 99th percentile."""


@dataclass(frozen=True, slots=True)
class Latencies:
    """Seconds between `low` and `high`, or log-normal about `low` with `sigma`.

    The share `tail` of all calls takes `tail_seconds` instead.
    """

    low: float = 0.0
    high: float | None = None
    sigma: float = 0.0
    tail: float = 0.0
    tail_seconds: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read one of the `FORMS`. Raises `ConfigurationError` that lists them."""
        try:
            return cls(**_read(text))
        except (ValueError, KeyError) as error:
            msg = f"--latency {text}: not a latency ({error}); write {FORMS}"
            raise ConfigurationError(msg) from None

    def draw(self, random: Random) -> float:
        """Return the seconds of one call."""
        if self.tail and random.random() < self.tail:
            return self.tail_seconds
        if self.sigma:
            return self.low * math.exp(random.gauss(0.0, self.sigma))
        return self.low if self.high is None else random.uniform(self.low, self.high)


def _read(text: str) -> dict[str, float]:
    found: dict[str, float] = {}
    named: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if equals:
            named[name.strip()] = value
        elif "-" in part:
            low, high = part.split("-")
            found |= {"low": _seconds(low), "high": _seconds(high)}
        else:
            found["low"] = _seconds(part)
    if unknown := set(named) - {"p50", "p99", "tail"}:
        raise ValueError(f"{min(unknown)!r} is unknown")
    if "tail" in named:
        share, _, takes = named["tail"].partition(":")
        found |= {"tail": _seconds(share), "tail_seconds": _seconds(takes)}
    if "p50" in named or "p99" in named:
        median, slow = _seconds(named["p50"]), _seconds(named["p99"])
        if not 0 < median <= slow:
            raise ValueError("p99 must not be below p50, nor p50 be 0")
        found |= {"low": median, "sigma": math.log(slow / median) / _Z99}
    if found.get("high", math.inf) < found["low"]:
        raise ValueError("the second number must not be below the first")
    if found.get("tail", 0.0) > 1:
        raise ValueError("the tail's share is above 1")
    return found


def _seconds(text: str) -> float:
    value = float(text)
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{text!r} is not a number from 0")
    return value
