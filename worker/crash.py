"""Named crash points: tests end a real worker process by SIGKILL exactly there.

`STEPFLEET_CRASH_AT=after-claim` ends the process at the first visit of that point,
`after-claim:3` at the third. Unset, which is always so outside tests, a point costs nothing.
"""

import os
import signal
from collections.abc import Callable, Mapping
from itertools import count

VARIABLE = "STEPFLEET_CRASH_AT"


def crash_points(environment: Mapping[str, str]) -> Callable[[str], None]:
    """Return what to call at a point, with its name."""
    wanted = environment.get(VARIABLE, "")
    if not wanted:
        return _pass
    name, _, nth = wanted.partition(":")
    visits = count(1)

    def visit(point: str) -> None:
        if point == name and next(visits) == int(nth or 1):
            os.kill(os.getpid(), signal.SIGKILL)

    return visit


def _pass(point: str) -> None:
    del point
