"""The claim of a worker on a step, and the reasons of its refusal."""

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from stepfleet.orchestrator.agents.config import AgentConfig
from stepfleet.orchestrator.limits.budgets import Exhausted
from stepfleet.orchestrator.limits.limit import NORMAL
from stepfleet.orchestrator.memory.window import History
from stepfleet.orchestrator.protocol.suspicion import NO_LOSSES, Losses
from stepfleet.orchestrator.records.calls.answers import Answer
from stepfleet.orchestrator.records.calls.tools import ToolCallRecord
from stepfleet.orchestrator.records.errors import ErrorInfo
from stepfleet.orchestrator.records.memory_window import Remembered
from stepfleet.orchestrator.records.responses import LLMResponse
from stepfleet.orchestrator.records.state import AgentState


@dataclass(frozen=True, slots=True)
class Work:
    """What a task message names: this step of this run may be due, or a tool call of it.

    Steps count from 0, and so does `index`, that of the call in its response; None for the step.
    """

    run_id: str
    step: int
    index: int | None = None

    @property
    def args(self) -> tuple[Any, ...]:
        """The arguments of its task."""
        at = (self.run_id, self.step)
        return at if self.index is None else (*at, self.index)

    @property
    def of_step(self) -> "Work":
        """The step that this is, or is a call of."""
        return Work(self.run_id, self.step)


class Refused(StrEnum):
    """Why a step or a tool call was refused. Each reason means: acknowledge, drop, count."""

    UNKNOWN = "unknown"
    ENDED = "ended"
    PAUSED = "paused"
    STALE = "stale"
    AHEAD = "ahead"
    LEASED = "leased"
    EARLY = "early"
    UNREADABLE = "unreadable"
    DRAINING = "draining"
    LIMITED = "limited"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A refused claim of a step or a tool call; `detail` explains it.

    `owes` is set where other runs are to learn of the run's end, or of a request to it.
    """

    why: Refused
    detail: str = ""
    owes: bool = False


@dataclass(frozen=True, slots=True)
class Journal:
    """The work of the open step that must not be repeated.

    `started` and `results` are keyed by the index of the tool call in the response. `remembered`
    is the memory work of the step where it was paid for.
    """

    response: LLMResponse | None = None
    started: frozenset[int] = frozenset()
    results: dict[int, ToolCallRecord] = field(default_factory=dict)
    remembered: Remembered | None = None
    spent: float = 0.0
    """Seconds that workers spent on this step before it waited for tool calls, and on those."""
    answers: dict[int, Answer] = field(default_factory=dict)
    """What other runs and people answered to calls that waited for them, by the call's index."""
    began: datetime | None = None
    """When the step began, if it has waited since (UTC)."""


@dataclass(frozen=True, slots=True)
class Outage:
    """A step's wait for services that are out, by their circuits (see `protocol.outage`).

    `since` is when it began (UTC). With `probes` the step is to find out whether one is back.
    """

    since: datetime
    circuits: tuple[str, ...]
    probes: bool = False


@dataclass(frozen=True, slots=True)
class Claim:
    """A step that this worker owns until its lease runs out.

    `token` fences every write. `now` is Redis's time of the claim. `attempts` counts the
    model attempts of this step that failed, `limited` those that were refused for now (429);
    `losses` are the workers that vanished with this step. `decided` is true when the commit
    before has evaluated the criteria. `unpriced` counts the calls of this step, whose workers
    were lost, that have no price. `history` is the conversation as a memory policy sees it,
    and None for a run without one.
    """

    run_id: str
    step: int
    token: str
    now: datetime
    state: AgentState
    config: AgentConfig
    journal: Journal = Journal()
    attempts: int = 0
    limited: int = 0
    losses: Losses = NO_LOSSES
    decided: bool = False
    batch_id: str | None = None
    line_id: str | None = None
    tenant: str | None = None
    history: History | None = None
    unpriced: int = 0
    outage: Outage | None = None
    priority: int = NORMAL
    """0 goes first where runs wait for limits of the fleet."""
    limited_by: str = ""
    """'own' where the run or its batch was submitted with a limit of its own."""
    billed: str | None = None
    """The batch that pays for a run which a run of it has started, or one below."""
    waited: float = 0.0
    """Seconds for which the step has waited for limits of the fleet."""
    waited_for: str = ""
    """For what, in words for people."""
    exhausted: Exhausted | None = None
    """The budget of the fleet that has no room for the step's call."""
    config_digest: str = ""
    """Of the stored configuration, to which the run's `overrides` (JSON) are added."""
    overrides: str = ""
    overdue: frozenset[int] = frozenset()
    """Indexes of tool calls that the run has waited for in vain."""
    broken: ErrorInfo | None = None
    """What went wrong behind the claim: the step fails with it."""
    uncalled: bool = False
    """Whether the store knows that no model call is made so far: a lost worker has paid nothing."""

    @property
    def payer(self) -> str:
        """The batch whose limits and costs its calls count towards; empty without one."""
        return self.batch_id or self.billed or ""

    @property
    def hint(self) -> Work:
        """What names this step in a task message."""
        return Work(self.run_id, self.step)

    @property
    def crashes(self) -> int:
        """How many workers have vanished with this step."""
        return self.losses.count

    @property
    def number(self) -> int:
        """The step's number as people see it, from 1."""
        return self.step + 1


class Want(StrEnum):
    """A request to a run that a worker holds."""

    CANCEL = "cancel"
    PAUSE = "pause"


@dataclass(frozen=True, slots=True)
class Held:
    """Answer to a journal entry or a renewal: whether the work is still ours.

    `want` is the text of a `Want`, or empty.
    """

    ours: bool
    want: str = ""


@dataclass(frozen=True, slots=True)
class Committed:
    """Answer to a commit. `status` is the run's; `wanted` asks to decide again.

    `owes` is set where other runs are to learn of the run's end, `is_last` where its batch may have
    ended with it.
    """

    applied: bool
    status: str = ""
    wanted: str = ""
    owes: bool = False
    is_last: bool = False
