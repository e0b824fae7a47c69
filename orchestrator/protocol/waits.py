"""How long to wait before a step is tried again. Seconds; pure."""

BASE = 1.0
FACTOR = 3.0
LONGEST = 120.0
LONGEST_WISH = 3600.0
_ENOUGH = 10


def backoff(failures: int, *, retry_after: float | None, jitter: float) -> float:
    """Return the wait after the `failures`-th failure in a row (from 1).

    Exponential from a second to two minutes, times 0.5 to 1 by `jitter` (0 to 1); never less
    than the provider's `retry_after` (an hour at most), to which up to a tenth is added so
    that waiting runs do not come back in one wave.
    """
    exponent = min(max(failures - 1, 0), _ENOUGH)
    wait = min(BASE * FACTOR**exponent, LONGEST) * (0.5 + jitter / 2)
    if retry_after is None:
        return wait
    return max(wait, min(retry_after, LONGEST_WISH) * (1 + jitter / 10))
