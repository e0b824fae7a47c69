"""What a call receives that waited for another run, or for a person. Stored with its step."""

from datetime import datetime
from enum import StrEnum
from hashlib import sha256
from json import dumps
from typing import Any, Literal

from pydantic import Field

from stepfleet.orchestrator.records.base import Record
from stepfleet.orchestrator.records.usage import UsageStats, sum_usd

LONGEST_OUTPUT = 8_000
"""Characters of a run's output that reach the run which waits for it."""


class SubAgentLimits(Record):
    """How far an agent's calls of its sub-agents go.

    `depth` is how many levels of runs may be below one that was submitted, as far as this agent
    starts them; `output` is how many characters of an answer it reads.
    """

    depth: int = Field(default=3, ge=0, le=10)
    output: int = Field(default=LONGEST_OUTPUT, ge=100, le=100_000)


class Awaited(StrEnum):
    """What a call waits for that no worker of a queue does. Stored in place of its queue."""

    RUN = "@run"
    """The end of a run that the call has started."""
    APPROVAL = "@approval"
    """A person's decision whether the call may be made."""
    PERSON = "@person"
    """A person's answer, which is the call's result."""

    @property
    def by_people(self) -> bool:
        """Whether a person answers: no worker has anything to do before its time limit."""
        return self in (Awaited.APPROVAL, Awaited.PERSON)


_AWAITED = frozenset(Awaited)


def awaited_by(place: str) -> Awaited | None:
    """Return what a call with that queue waits for; None for a queue."""
    return Awaited(place) if place in _AWAITED else None


class After(Record):
    """What a run waits for before it begins: the ends of `runs`, ids by the names of their places.

    `text` is its input with places for their results; None for an input without. If one of them
    does not complete, the run ends ("stop"), or begins all the same ("run").
    """

    runs: dict[str, str]
    text: str | None = None
    failed: Literal["stop", "run"] = "stop"

    @property
    def ids(self) -> list[str]:
        """The ids of these runs, each once."""
        return list(dict.fromkeys(self.runs.values()))


class RunEnd(Record):
    """The end of a run, as another one reads it.

    `status` is the text of a `RunStatus`, `stop_reason` that of a `StopReason`. `cut` counts the
    characters that were left out of `output`. `usage` and `cost_usd` are the run's own,
    `below_usage` and `below_cost_usd` those of the runs that it has started itself.
    """

    run_id: str
    agent: str
    status: str
    stop_reason: str = ""
    output: str | None = None
    cut: int = 0
    error: str | None = None
    steps: int = 0
    usage: UsageStats = UsageStats()
    cost_usd: float = 0.0
    below_usage: UsageStats = UsageStats()
    below_cost_usd: float = 0.0

    @property
    def total_usage(self) -> UsageStats:
        """What it and all runs below it have used."""
        return self.usage + self.below_usage

    @property
    def total_cost_usd(self) -> float:
        """What it and all runs below it have cost."""
        return sum_usd(self.cost_usd, self.below_cost_usd)


class Decision(Record):
    """What a person has decided about a call, or answered to it.

    `by` is who, as they named themselves, `at` when (UTC). `by_default` is set where the time limit
    decided. `text` is the answer to a question, `reason` why.
    """

    approved: bool
    by: str = ""
    at: datetime | None = None
    reason: str = ""
    text: str | None = None
    by_default: bool = False

    def __str__(self) -> str:
        """Return who decided what, when, and why."""
        verb = "answered" if self.text is not None else "approved"
        by = "the time limit" if self.by_default else self.by or "nobody named"
        at = f", {self.at:%Y-%m-%d %H:%M:%S} UTC" if self.at else ""
        why = f": {self.reason}" if self.reason else ""
        return f"{verb if self.approved else 'denied'} by {by}{at}{why}"


class Answer(Record):
    """The answer to a call that waited: the end of its run, or a person's decision."""

    run: RunEnd | None = None
    decision: Decision | None = None


class Ask(Record):
    """A call that waits for a person. `kind` is approval or question; times are UTC.

    `step` counts from 1, `index` is the call's place in the model's answer. `key` names exactly
    this call: equal calls of other runs have others. `until` is when its time limit decides, or the
    run's own time ends before that.
    `batch_id` is the batch of its run, or of the one that has started that.
    """

    run_id: str
    step: int
    index: int
    key: str
    call_id: str
    kind: str
    agent: str
    tool: str
    arguments: dict[str, Any] = Field(default_factory=dict)
    since: datetime
    until: datetime | None = None
    batch_id: str | None = None
    line_id: str | None = None
    tenant: str | None = None

    @property
    def group(self) -> str:
        """What equal calls share: agent, tool and arguments, as a short digest."""
        same = dumps([self.agent, self.tool, self.arguments], sort_keys=True)
        return sha256(same.encode()).hexdigest()[:32]


class AskPage(Record):
    """Calls that wait for people, the oldest first; `next` is the next page's cursor."""

    asks: tuple[Ask, ...] = ()
    next: str | None = None


class AskCount(Record):
    """How many calls wait for people; `more` where there may be others: only some are looked at."""

    count: int = 0
    more: bool = False

    def __str__(self) -> str:
        """Return the number of calls in words."""
        if self.count == 1 and not self.more:
            return "1 call waits for a person"
        return f"{self.count:,}{' or more' if self.more else ''} calls wait for people"


class Decided(Record):
    """How many calls a decision reached. `late` counts those that had one, or had gone on.

    `first` is the decision that counts of one of these.
    """

    applied: int = 0
    late: int = 0
    first: Decision | None = None

    def plus(self, other: "Decided") -> "Decided":
        """Return both together."""
        first = self.first or other.first
        return Decided(
            applied=self.applied + other.applied, late=self.late + other.late, first=first
        )
