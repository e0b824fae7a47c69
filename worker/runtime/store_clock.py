"""Notices that a store's clock was set forward, by this process's own clock, which nobody sets.

Leases are times of Redis. A clock that is set forward ends them all at once, though whoever holds
them lives and renews them. Knows nothing of Redis: its caller brings the answers.
"""

import math
import time
from collections.abc import Callable


class StoreClock:
    """The last time of Redis's clock at each place (a server, a shard), and when that was here.

    `tolerance`: steps of so many seconds are none. `elapsed` returns seconds that only grow.
    """

    def __init__(
        self, tolerance: float = math.inf, elapsed: Callable[[], float] = time.monotonic
    ) -> None:
        self.tolerance = tolerance
        self._elapsed = elapsed
        self._known: dict[str, tuple[float, int]] = {}

    def asks(self) -> float:
        """Return this process's time, to be given to `answered` with the request's answer."""
        return self._elapsed()

    def answered(self, place: str, sent: float, now_ms: int) -> float:
        """Return the seconds by which the clock of `place` was set forward; 0 where it was not.

        `now_ms` is its answer to the request of `sent`. The first answer proves nothing.
        """
        latest = self.latest(place)
        ahead = 0.0 if latest is None else (now_ms - latest) / 1000
        self._known[place] = (sent, now_ms)
        return ahead + self.tolerance if ahead > 0 else 0.0

    def latest(self, place: str) -> int | None:
        """Return the latest time (ms) that `place` can have now without having been set forward.

        None where that is not known.
        """
        if place not in self._known or math.isinf(self.tolerance):
            return None
        sent, now_ms = self._known[place]
        return now_ms + math.ceil((self._elapsed() - sent + self.tolerance) * 1000)
