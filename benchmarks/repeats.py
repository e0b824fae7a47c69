"""Medians, spreads and ratios of repeated measurements. Pure."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """Several measurements of one thing; `low` and `high` are the extremes."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        """Return the spread of at least one value."""
        known = sorted(values)
        return cls(statistics.median(known), known[0], known[-1], len(known))

    @property
    def share(self) -> float:
        """Half of the distance between the extremes, as a share of the median."""
        return (self.high - self.low) / 2 / self.median if self.median else 0.0

    def shown(self, digits: int) -> str:
        """Return the median, with the spread where there were several measurements."""
        text = f"{self.median:.{digits}f}"
        return f"{text} ±{self.share:.0%}" if self.count > 1 else text


def paired(over: Sequence[float], under: Sequence[float]) -> Spread | None:
    """Return the spread of the ratios of pairs, each measured one after the other."""
    ratios = [one / other for one, other in zip(over, under, strict=False) if other]
    return Spread.of(ratios) if ratios else None
