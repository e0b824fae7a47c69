"""The claim of a worker on a step, its refusals, and suspicions after lost workers."""

from collections.abc import Iterable, Sequence
from dataclasses import field
from datetime import datetime
from enum import StrEnum
from typing import Any

from stepfleet.orchestrator.agents.config import AgentConfig
from stepfleet.orchestrator.limits.budgets import Exhausted
from stepfleet.orchestrator.limits.limit import NORMAL
from stepfleet.orchestrator.memory.window import History
from stepfleet.orchestrator.records.calls.answers import Answer
from stepfleet.orchestrator.records.calls.tools import ToolCallRecord
from stepfleet.orchestrator.records.errors import ErrorInfo
from stepfleet.orchestrator.records.memory_window import Remembered
from stepfleet.orchestrator.records.responses import LLMResponse
from stepfleet.orchestrator.records.state import AgentState
from stepfleet.orchestrator.records.values import value_class

MOST_IN_GROUP = 128
DIVISOR = 8
"""A group that has died is divided into this many: three deaths find one among five hundred."""
UNPROVEN = 12
"""So many losses beyond the limit end work without a proof; each of the last ones costs a wait."""
FREE = 3
"""Losses beyond the limit after which work goes on at once."""
LONGEST_DELAY = 900.0


class How(StrEnum):
    """The known facts of a lost attempt."""

    MODEL = "m"
    """No tool was started and unfinished: it was asking the model, or remembering."""
    TOOLS = "t"
    """A tool was."""
    BOTH = "p"
    """It was in a process for suspects whose death no one observed: its parent is gone as well."""
    ALONE = "a"
    """A process for suspects has died while the process that started it lived on."""
    CHILD = "c"
    """A pool's child, which does one thing at a time, has died while its parent lived on."""


@value_class(frozen=True, slots=True)
class Loss:
    """One lost attempt; `group` counts what was in its process, where that was for suspects."""

    token: str
    how: How
    group: int = 0


class Stance(StrEnum):
    """The suspicion against the work."""

    CLEAR = "clear"
    SUSPECT = "suspect"
    PROVEN = "proven"


@value_class(frozen=True, slots=True)
class Suspicion:
    """A stance; of a suspect, the largest group it may be in, and whether tools are the reason."""

    stance: Stance
    most: int = MOST_IN_GROUP
    by_tools: bool = False


NO_SUSPICION = Suspicion(Stance.CLEAR)


@value_class(frozen=True, slots=True)
class Losses:
    """How often an open step, or a tool call, has lost its worker, and what is known of each time.

    `count` includes losses of which nothing is known (an older worker has counted them). `new` is
    true for a claim that has just counted one, `uncalled` where that one had made no model call;
    `unpaid` is how many of them had made none.
    """

    count: int = 0
    known: tuple[Loss, ...] = ()
    new: bool = False
    uncalled: bool = False
    unpaid: int = 0

    @property
    def paid(self) -> int:
        """How many of the workers may have paid for a call of the step."""
        return max(self.count - self.unpaid, 0)

    def suspicion(self, limit: int) -> Suspicion:
        """Return the suspicion when `limit` workers may be lost with it.

        A limit of one gives it up with its first loss, whatever its cause.
        """
        if not self.count:
            return NO_SUSPICION
        if self._is_proven(limit):
            return Suspicion(Stance.PROVEN)
        by_tools = any(one.how is How.TOOLS for one in self.known)
        isolated = [one for one in self.known if one.how in (How.ALONE, How.BOTH)]
        if not isolated:
            suspect = self.count >= (limit - 1 if by_tools else limit)
            return Suspicion(Stance.SUSPECT if suspect else Stance.CLEAR, by_tools=by_tools)
        divisor = DIVISOR if isolated[-1].how is How.ALONE else 2
        return Suspicion(Stance.SUSPECT, max(1, -(-isolated[-1].group // divisor)), by_tools)

    def delay(self, limit: int, grace: float) -> float:
        """Return the seconds that pass before it is tried again.

        Work that loses workers without a proof is retried at growing intervals: so innocent work
        outlasts a bad hour, and guilty work disturbs few.
        """
        beyond = self._unproven() - limit - FREE
        if not self.new or beyond < 0:
            return 0.0
        return float(min(grace * 2.0**beyond, LONGEST_DELAY))

    def _is_proven(self, limit: int) -> bool:
        if self.count < limit:
            return False
        if limit <= 1 or self._unproven() >= limit + UNPROVEN:
            return True
        children = sum(one.how is How.CHILD for one in self.known)
        return children >= limit or any(
            one.how is How.ALONE and one.group == 1 for one in self.known
        )

    def _unproven(self) -> int:
        return self.count - sum(one.how in (How.ALONE, How.CHILD) for one in self.known)


NO_LOSSES = Losses()


def losses(
    count: int, text: str, step: int, *, new: bool = False, uncalled: bool = False, unpaid: str = ""
) -> Losses:
    """Return the losses of that step in a record's `text`: `<step> <token>:<how> ...`.

    Entries beyond `count` are older, and void: they were counted before the step was retried.
    """
    if not count and not new:
        return NO_LOSSES
    at, _, entries = text.partition(" ")
    known = tuple(_read(entries.split())) if at == str(step) else ()
    known = known[max(len(known) - count, 0) :]
    return Losses(count, known, new, uncalled, unpaid_of(unpaid, step))


def unpaid_of(text: str, step: int) -> int:
    """Return how many losses of that step had made no call, by the header's `<step> <number>`."""
    at, _, times = text.partition(" ")
    return int(times or 0) if at == str(step) else 0


def _read(entries: Iterable[str]) -> Iterable[Loss]:
    for entry in entries:
        token, _, how = entry.rpartition(":")
        if token and how[:1] in tuple(How):
            yield Loss(token, How(how[0]), int(how[1:] or 0))


def next_group(waiting: Sequence[Suspicion], places: int) -> list[int]:
    """Return which of the suspects that wait, by their index, share the next process.

    The first one is among them. Suspects by tools are spread over the places: they may well be to
    blame. Other suspects are mostly innocent, and go together.
    """
    first = waiting[0]
    alike = [n for n, one in enumerate(waiting) if one.by_tools == first.by_tools]
    room = min(-(-len(alike) // max(places, 1)) if first.by_tools else len(alike), first.most)
    group: list[int] = []
    for index in alike:
        most = min(room, waiting[index].most)
        if len(group) < most:
            group.append(index)
            room = most
    return group


@value_class(frozen=True, slots=True)
class Work:
    """What a task message names: this step of this run may be due, or a tool call of it.

    Steps count from 0, and so does `index`, that of the call in its response; None for the step.
    """

    run_id: str
    step: int
    index: int | None = None

    @property
    def args(self) -> list[Any]:
        """The arguments of its task."""
        args = [self.run_id, self.step, self.index]
        return args if self.index is not None else args[:2]

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


@value_class(frozen=True, slots=True)
class Refusal:
    """A refused claim of a step or a tool call; `detail` explains it.

    `owes` is set where other runs are to learn of the run's end, or of a request to it.
    """

    why: Refused
    detail: str = ""
    owes: bool = False


@value_class(frozen=True, slots=True)
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


@value_class(frozen=True, slots=True)
class Outage:
    """A step's wait for services that are out, by their circuits (see `protocol.outage`).

    `since` is when it began (UTC). With `probes` the step is to find out whether one is back.
    """

    since: datetime
    circuits: tuple[str, ...]
    probes: bool = False


@value_class(frozen=True, slots=True)
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
    """What went wrong after the claim: the step fails with it."""
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


@value_class(frozen=True, slots=True)
class Held:
    """Answer to a journal entry or a renewal: whether the work is still ours.

    `want` is the text of a `Want`, or empty.
    """

    ours: bool
    want: str = ""


@value_class(frozen=True, slots=True)
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
