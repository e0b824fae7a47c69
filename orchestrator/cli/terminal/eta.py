"""How fast a batch goes and when it will be done. Pure: times come in as arguments."""

from dataclasses import dataclass

WINDOW_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Sample:
    """Runs ended and steps committed at a time (seconds of any steady clock)."""

    at: float
    done: int
    steps: int


@dataclass(frozen=True, slots=True)
class Pace:
    """The samples of the last `WINDOW_SECONDS`."""

    samples: tuple[Sample, ...] = ()

    def with_sample(self, sample: Sample) -> "Pace":
        """Return the pace with a newer sample and without outdated ones."""
        kept = [one for one in self.samples if one.at >= sample.at - WINDOW_SECONDS]
        return Pace((*kept, sample))

    @property
    def steps_per_second(self) -> float:
        """Steps per second over the window; 0 until it is known."""
        return self._rate("steps")

    def eta_seconds(self, still_open: int) -> float | None:
        """Return the seconds until `still_open` more runs have ended, or None if unknown."""
        if still_open <= 0:
            return 0.0
        rate = self._rate("done")
        return still_open / rate if rate > 0 else None

    def _rate(self, field: str) -> float:
        if len(self.samples) < 2:  # noqa: PLR2004 - a rate needs two points
            return 0.0
        first, last = self.samples[0], self.samples[-1]
        span = last.at - first.at
        growth: int = getattr(last, field) - getattr(first, field)
        return max(0.0, growth / span) if span > 0 else 0.0
