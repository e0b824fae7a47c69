"""Logs the tracebacks of failed user code: a few for each cause and minute, then their number."""

import logging
import time
from collections.abc import Callable, Hashable

from stepfleet.orchestrator.records.text.tracebacks import place_of

MOST_EQUAL = 5
"""Tracebacks of one cause that are logged within `PERIOD` seconds."""
PERIOD = 60.0
MOST_CAUSES = 500

log = logging.getLogger("stepfleet.failures")


class Equals:
    """Counts equal causes, so that a flood of them is a line for each of the first ones."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counted: dict[Hashable, tuple[float, int]] = {}

    def left_out(self, cause: Hashable) -> int | None:
        """Return how many of the cause were left out before this one; None to leave it out too."""
        now = self._clock()
        since, count = self._counted.get(cause, (now, 0))
        left_out = 0
        if now - since >= PERIOD:
            left_out, since, count = max(count - MOST_EQUAL, 0), now, 0
        if cause not in self._counted and len(self._counted) >= MOST_CAUSES:
            self._counted.clear()
        self._counted[cause] = (since, count + 1)
        return left_out if count < MOST_EQUAL else None


_equals = Equals()


def log_failure(
    what: str,
    message: str,
    text: str | None,
    error: Exception | None = None,
    run_id: str = "",
) -> None:
    """Log that `what` failed, with the traceback `text`; nothing where that is None.

    Handlers print `text`, which has no secrets; those that look at `exc_info` have `error`.
    """
    if text is None or not log.isEnabledFor(logging.WARNING):
        return
    left_out = _equals.left_out((what, place_of(text)))
    if left_out is None:
        return
    more = f" ({left_out} more like it were not logged)" if left_out else ""
    known = (type(error), error, error.__traceback__) if error else None
    line = "%s%s failed: %s%s"
    values = (what, f" of run {run_id}" if run_id else "", message, more)
    record = log.makeRecord(log.name, logging.WARNING, __file__, 0, line, values, known)
    record.exc_text = text
    log.handle(record)
