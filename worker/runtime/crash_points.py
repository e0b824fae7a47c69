"""Named crash points: tests end a real worker process by SIGKILL exactly there.

`STEPFLEET_CRASH_AT=after-claim` ends the process at the first visit of that point,
`after-claim:3` at the third. A point whose name begins with `during-` ends it a moment later, in
the midst of the following code. `STEPFLEET_CRASH_ONCE` names a file that the process makes before;
where it exists no process is ended any more, so that a pool's next child lives.
`STEPFLEET_CRASH_BY` names another signal, `SIGSTOP` to sleep there. Unset, which is always so
outside tests, a point costs nothing.
"""

import os
import signal
import threading
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path

VARIABLE = "STEPFLEET_CRASH_AT"
ONCE = "STEPFLEET_CRASH_ONCE"
BY = "STEPFLEET_CRASH_BY"
DURING = "during-"
DURING_SECONDS = 0.05

POINTS = (
    "message-popped",  # the worker has the message, nothing is claimed
    "before-claim",
    "after-claim",
    "during-call",  # the model is answering
    "after-reply",  # the model has answered, nothing is journaled
    "before-journal",
    "after-journal",
    "tool-started",  # marked as started, not running yet
    "during-tool",
    "after-tool",  # its result is in memory only
    "after-tools",
    "tool-parked",  # the step waits for calls; they are not published where that comes after it
    "call-taken",  # a tool call's own task has it, and has not begun
    "during-call-task",
    "call-made",  # its result is in memory only
    "call-delivered",  # the step's hint is not published where that comes after the delivery
    "before-commit",
    "commit-applied",  # the next hint is not published where that comes after the commit
    "end-applied",  # the same of a commit that ends the run
    "after-commit",  # and after the next hint was published
    "before-acknowledge",
    "step-put-back",  # it has no grant for its call, and waits in no line yet
    "limits-requested",  # it waits in a line, and would be searched for
    "limits-admitted",  # steps have their grants, and are not published
    "rescue-saved",  # overdue runs are re-armed, and not published
)

ARCHIVE_POINTS = (
    "archive-begun",  # a file is entered as one that is being written
    "archive-written",  # it is there, and nobody has read it back
    "archive-entered",  # it is entered as a whole; all its runs are in Redis
    "archive-removing",  # some of them are not
)
"""Those of a process that moves ended runs to the archive."""

LINK_POINTS = (
    "run-started",  # a call's run is created, and not published
    "call-attended",  # a call that waits was looked after, and no record tells until when
    "call-answered",  # its step's hint is not published where that comes after the answer
    "end-owed",  # a run has ended; the calls that wait for it have no answer
    "end-sent",  # they have it, and no record says so
)
"""Those between runs that wait for each other, or for people."""

Visit = Callable[[str], None]


def crash_points(environment: Mapping[str, str]) -> Visit:
    """Return what to call at a point, with its name. Raises `ValueError` for an unknown point."""
    wanted = environment.get(VARIABLE, "")
    if not wanted:
        return unharmed
    name, _, nth = wanted.partition(":")
    if name not in (known := POINTS + LINK_POINTS + ARCHIVE_POINTS):
        raise ValueError(f"{VARIABLE}={wanted!r} is not a crash point; use {', '.join(known)}")
    by = signal.Signals[environment.get(BY, "SIGKILL")]
    once = environment.get(ONCE)
    visits = count(1)

    def end() -> None:
        if once is None or _is_first(Path(once)):
            os.kill(os.getpid(), by)

    def visit(point: str) -> None:
        if point != name or next(visits) != int(nth or 1):
            return
        if point.startswith(DURING):
            threading.Timer(DURING_SECONDS, end).start()
        else:
            end()

    return visit


def unharmed(point: str) -> None:
    """Do nothing at `point`."""
    del point


def _is_first(mark: Path) -> bool:
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
