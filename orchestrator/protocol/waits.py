"""How long to wait before a step is tried again. Seconds; pure."""

BASE = 0.5
FACTOR = 2.0
LONGEST = 60.0


def backoff(failures: int, *, retry_after: float | None, jitter: float) -> float:
    """Return the wait after the `failures`-th failure in a row (from 1).

    Exponential from half a second to a minute, times 0.5 to 1 by `jitter` (0 to 1); never
    less than the provider's `retry_after`, to which up to a tenth is added so that waiting
    runs do not come back in one wave.
    """
    wait = min(BASE * FACTOR ** max(failures - 1, 0), LONGEST) * (0.5 + jitter / 2)
    if retry_after is None:
        return wait
    return max(wait, retry_after * (1 + jitter / 10))
