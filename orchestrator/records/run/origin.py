"""The origin of a run that did not begin with its own input. Pure values."""

from enum import StrEnum

from stepfleet.orchestrator.records.base import Record


class OriginKind(StrEnum):
    """How a run began from another one."""

    FORK = "fork"
    CHECKPOINT = "checkpoint"
    RESULT = "result"


class RunOrigin(Record):
    """The run from which this one began, and the part taken over.

    `at` is the number of its steps that this run's log begins with; `tokens` and `cost_usd` are
    what those steps had used: they are part of this run's totals and were paid for there.
    """

    kind: OriginKind
    run_id: str
    at: int = 0
    tokens: int = 0
    cost_usd: float = 0.0
