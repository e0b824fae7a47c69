"""What a tool's status hook may answer when it is asked what became of a lost call. Values only."""

from dataclasses import dataclass
from enum import Enum
from typing import Any


class CallStatus(Enum):
    """What is known of a call whose worker was lost, where it has no result to tell.

    Members are no text, so that a result of the same words is never taken for one.
    """

    NOT_DONE = "not done"
    """It took no effect, and none is still to come: it is run (again)."""
    UNKNOWN = "unknown"
    """Nobody knows: it is not run again, and the model is told `OUTCOME_UNKNOWN`."""


@dataclass(frozen=True, slots=True)
class Done:
    """It was done; `result` is what it returned, None included."""

    result: Any = None
