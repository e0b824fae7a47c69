"""A run as a list shows it, and a page of such a list. Pure."""

from datetime import datetime

from pydantic import Field

from stepfleet.orchestrator.records.base import Record
from stepfleet.orchestrator.records.outcome import StopReason
from stepfleet.orchestrator.records.state import Lifecycle


class RunSummary(Record):
    """A run as a list shows it, without its conversation.

    `active_seconds` is the time of its current execution's steps; it, `tokens` and `cost_usd` are
    None where the run's state is too large to be read for a list. `error` is cut.
    """

    run_id: str
    agent: str
    status: Lifecycle
    stop_reason: StopReason | None = None
    error: str | None = None
    batch_id: str | None = None
    line_id: str | None = None
    tenant: str | None = None
    parent: str | None = None
    created: datetime
    updated: datetime
    ended: datetime | None = None
    steps: int = 0
    max_steps: int | None = None
    lost_workers: int = 0
    active_seconds: float | None = None
    tokens: int | None = None
    cost_usd: float | None = None


class RunPage(Record):
    """A page of runs, the newest first. `next` is the cursor of the next page, None at the end.

    A page may have fewer runs than its limit, or none, and a `next`: so many runs (`looked_at`)
    were looked at, and more may match.
    """

    runs: tuple[RunSummary, ...] = Field(default=())
    next: str | None = None
    looked_at: int = 0
