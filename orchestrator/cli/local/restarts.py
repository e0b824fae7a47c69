"""Whether a worker that died is started anew, and when. Pure."""

from dataclasses import dataclass

QUICK_SECONDS = 10.0
QUICK_DEATHS = 4
_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 30.0


@dataclass(frozen=True, slots=True)
class Restarts:
    """How often in a row a worker died soon after its start."""

    quick_deaths: int = 0

    def after_death(self, lived_seconds: float) -> "Restarts":
        """Return the count after one more death; a long life starts it anew."""
        return Restarts(self.quick_deaths + 1 if lived_seconds < QUICK_SECONDS else 0)

    @property
    def hopeless(self) -> bool:
        """Whether starting it again is no use."""
        return self.quick_deaths >= QUICK_DEATHS

    @property
    def pause(self) -> float:
        """Seconds to wait before the next start."""
        return min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0 ** max(0, self.quick_deaths - 1))
