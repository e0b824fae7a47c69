"""What this process still owes to one broker, kept across its connections.

Celery makes a new channel for every new connection, while tasks that ran before go on and are
acknowledged after. Their acknowledgements, and the messages that have to be given back, wait here
for whichever channel is there to send them. Must not know how that is done.
"""

import os
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

_LEDGERS: dict[tuple[object, ...], "PendingAcks"] = {}


@dataclass(frozen=True, slots=True)
class LostFetch:
    """A fetch whose reply never came: what it may have registered, and the acks it carried."""

    fetcher: str
    tags: tuple[str, ...]
    acks: tuple[str, ...]


@dataclass(slots=True)
class PendingAcks:
    """Debts to one broker; acknowledgements may be added from any thread."""

    acks: deque[str] = field(default_factory=deque)
    returns: deque[tuple[str, bool]] = field(default_factory=deque)  # tag, behind the others
    given_up: deque[str] = field(default_factory=deque)  # fetchers that must take nothing any more
    carried: set[str] = field(default_factory=set)  # of closed channels, whose tasks still run
    counts: Counter[str] = field(default_factory=Counter)

    def acknowledge(self, tag: str) -> None:
        """Owe an acknowledgement."""
        self.carried.discard(tag)
        self.acks.append(tag)

    def take_acks(self, most: int) -> tuple[str, ...]:
        """Take up to ``most`` acknowledgements to send; owe them again where that fails."""
        taken: list[str] = []
        while self.acks and len(taken) < most:
            taken.append(self.acks.popleft())
        return tuple(taken)

    def put_back(self, acks: tuple[str, ...]) -> None:
        """Put acknowledgements back that could not be sent."""
        self.acks.extendleft(reversed(acks))

    def lost(self, fetch: LostFetch) -> None:
        """Note a fetch without a reply: its messages go back, its acknowledgements are repeated."""
        self.counts["lost_fetches"] += 1
        self.given_up.append(fetch.fetcher)
        self.returns.extend((tag, False) for tag in reversed(fetch.tags))
        self.put_back(fetch.acks)


def pending_acks_of(*broker: object) -> PendingAcks:
    """Return this process's ledger for the broker that these values identify."""
    return _LEDGERS.setdefault((os.getpid(), *broker), PendingAcks())


def counts() -> dict[str, int]:
    """Sum what all channels of this process did: fetches, messages, acknowledgements, ..."""
    total: Counter[str] = Counter()
    for (pid, *_), ledger in list(_LEDGERS.items()):
        if pid == os.getpid():
            total.update(ledger.counts)
    return dict(total)


def running_tags() -> frozenset[Any]:
    """Delivery tags of the requests that Celery's worker runs in this process."""
    from celery.worker.state import active_requests  # noqa: PLC0415 clients need no worker state

    return frozenset(request.message.delivery_tag for request in tuple(active_requests))
