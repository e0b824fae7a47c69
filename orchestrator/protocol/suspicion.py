"""Whether work is to blame for the loss of its workers: clear, suspect, or proven. Pure.

A lost worker proves nothing about what it held: it may have been killed from outside. So work is
suspect only after repeated losses, and given up only when a process that did nothing else has died
of it while the process that started it lived on. Suspects are tried in groups; a group that dies is
divided, until one of it dies alone or all of it have gone on.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

MOST_IN_GROUP = 128
DIVISOR = 8
"""A group that has died is divided into so many: three deaths find one among five hundred."""
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


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class Suspicion:
    """A stance; of a suspect, the largest group it may be in, and whether tools are the reason."""

    stance: Stance
    most: int = MOST_IN_GROUP
    by_tools: bool = False


@dataclass(frozen=True, slots=True)
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
        if self._is_proven(limit):
            return Suspicion(Stance.PROVEN)
        by_tools = any(one.how is How.TOOLS for one in self.known)
        alone = any(one.how in (How.ALONE, How.BOTH) for one in self.known)
        if self.count >= (limit - 1 if by_tools else limit) or alone:
            return Suspicion(Stance.SUSPECT, self._most(), by_tools)
        return Suspicion(Stance.CLEAR)

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
        deaths = [one.how for one in self.known if _is_alone(one)]
        return How.ALONE in deaths or len(deaths) >= limit

    def _unproven(self) -> int:
        return self.count - sum(one.how in (How.ALONE, How.CHILD) for one in self.known)

    def _most(self) -> int:
        tried = [one for one in self.known if one.how in (How.ALONE, How.BOTH)]
        if not tried:
            return MOST_IN_GROUP
        last = tried[-1]
        return max(1, -(-last.group // (DIVISOR if last.how is How.ALONE else 2)))


NO_LOSSES = Losses()


def _is_alone(loss: Loss) -> bool:
    return loss.how is How.CHILD or (loss.how is How.ALONE and loss.group == 1)


def losses(
    count: int, text: str, step: int, *, new: bool = False, uncalled: bool = False, unpaid: str = ""
) -> Losses:
    """Return the losses of that step in a record's `text`: `<step> <token>:<how> ...`.

    Entries beyond `count` are older, and void: they were counted before the step was retried.
    """
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


@dataclass(frozen=True, slots=True)
class Suspect:
    """The facts of a suspect that decide its group."""

    most: int
    by_tools: bool


def next_group(waiting: Sequence[Suspect], places: int) -> list[int]:
    """Return which of the suspects that wait, by their index, share the next process.

    The first one is among them. Suspects by tools are spread over the places: they may well be to
    blame. Other suspects are mostly innocent, and go together.
    """
    first = waiting[0]
    alike = [n for n, one in enumerate(waiting) if one.by_tools == first.by_tools]
    room = -(-len(alike) // max(places, 1)) if first.by_tools else len(alike)
    room = min(room, first.most, MOST_IN_GROUP)
    group: list[int] = []
    for index in alike:
        most = min(room, waiting[index].most)
        if len(group) < most:
            group.append(index)
            room = most
    return group
