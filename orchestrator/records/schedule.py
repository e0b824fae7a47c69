"""A schedule: which batch is submitted when, and what came of it. Pure values."""

from datetime import datetime, timedelta
from typing import Any, Literal

from pydantic import Field

from stepfleet.orchestrator.records.base import Record

Missed = Literal["newest", "all", "skip"]
Overlap = Literal["allow", "skip"]
LATE = timedelta(minutes=2)
"""A schedule that is so much behind is in trouble."""


class Schedule(Record):
    """What is submitted at each tick, and when.

    `cron` has five fields (minute, hour, day, month, weekday), in the time zone `tz` (a name of the
    IANA database), or is `@daily` and the like, or `@every 15m`. `jitter` is in seconds: each tick
    is later by a part of it. `missed` says which of the ticks are made up that came while no worker
    was up: the newest, all (up to 100), or none. With `overlap` skip, a tick is left out while the
    batch before it is open. `config` is the digest of the agent's configuration, `rows` how many
    lines each batch has, `rows_key` where they are. `limit` is each batch's own.
    """

    name: str
    cron: str
    tz: str = "UTC"
    agent: str
    config: str
    rows: int = 0
    rows_key: str = ""
    is_table: bool = False
    input_field: str | None = None
    id_field: str | None = None
    jitter: float = 0.0
    missed: Missed = "newest"
    overlap: Overlap = "allow"
    paused: bool = False
    tenant: str | None = None
    priority: int | None = None
    limit: dict[str, Any] | None = None
    overrides: dict[str, Any] = Field(default_factory=dict)
    created: datetime


class ScheduleState(Record):
    """The results of a schedule's ticks; times are UTC.

    `last_tick` is up to where ticks are dealt with: the newest one, also if it was left out, or
    when the schedule was resumed. `submitted_tick` is the newest tick that was submitted,
    `batch_id` its batch, `skipped` counts the ticks that were
    left out, `error` is why the newest tick could not be submitted (yet), `tries` how often.
    `begun` is the tick that is being submitted: whoever comes next completes its batch.
    """

    last_tick: datetime | None = None
    submitted_tick: datetime | None = None
    batch_id: str | None = None
    submitted: int = 0
    skipped: int = 0
    error: str | None = None
    tries: int = 0
    begun: datetime | None = None


class ScheduleView(Record):
    """A schedule, its results, and its next tick (None while it is paused).

    `run_now` is the newest batch outside its ticks.
    """

    schedule: Schedule
    state: ScheduleState = ScheduleState()
    next_tick: datetime | None = None
    run_now: str | None = None

    def is_unserved(self, now: datetime, *, served: bool) -> bool:
        """Return whether something is due, and nobody is alive to submit it."""
        return not served and self.next_tick is not None and self.next_tick <= now

    def trouble(self, now: datetime, *, served: bool = True) -> str:
        """Return what is wrong with it at `now`, or ''; `served`: a worker or a keeper is alive."""
        state = self.state
        if self.is_unserved(now, served=served):
            due = f"{self.next_tick:%Y-%m-%d %H:%M:%S} UTC"
            return f"late: no worker is alive to submit what was due at {due}"
        if state.error:
            return f"not submitted, tried {state.tries:,} times: {state.error}"
        if self.next_tick and now - self.next_tick > LATE:
            return f"nobody has submitted what was due at {self.next_tick:%Y-%m-%d %H:%M:%S} UTC"
        if self.next_tick and state.last_tick and state.last_tick - now > LATE:
            return (
                f"Redis's clock was set back: it rests until {self.next_tick:%Y-%m-%d %H:%M:%S} UTC"
            )
        return ""
