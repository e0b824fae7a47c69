"""Acknowledgements and restores that one broker has not received yet, kept across connections.

Celery makes a new channel for every new connection, while tasks that started before go on and are
acknowledged later. Their acknowledgements, and the messages to restore, wait here for whichever
channel is connected. Must not know how they are sent.
"""

import os
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

_BY_BROKER: dict[tuple[object, ...], "PendingAcks"] = {}


@dataclass(frozen=True, slots=True)
class LostFetch:
    """A fetch whose reply never came: what it may have registered, and the acks it carried."""

    fetcher: str
    tags: tuple[str, ...]
    acks: tuple[str, ...]


@dataclass(slots=True)
class PendingAcks:
    """The unsent part of one broker; acknowledgements may be added from any thread."""

    acks: deque[str] = field(default_factory=deque)
    restores: deque[tuple[str, bool]] = field(default_factory=deque)  # tag, behind the others
    lost_fetchers: deque[str] = field(default_factory=deque)  # must not take anything any more
    running: set[str] = field(default_factory=set)  # of closed channels, whose tasks still run
    counts: Counter[str] = field(default_factory=Counter)

    def acknowledge(self, tag: str) -> None:
        """Add an acknowledgement to send."""
        self.running.discard(tag)
        self.acks.append(tag)

    def take_acks(self, most: int) -> tuple[str, ...]:
        """Take up to ``most`` acknowledgements to send; put them back where that fails."""
        taken: list[str] = []
        while self.acks and len(taken) < most:
            taken.append(self.acks.popleft())
        return tuple(taken)

    def put_back(self, acks: tuple[str, ...]) -> None:
        """Put acknowledgements back that could not be sent."""
        self.acks.extendleft(reversed(acks))

    def lost(self, fetch: LostFetch) -> None:
        """Add a fetch without a reply: its messages are restored, its acknowledgements repeated."""
        self.counts["lost_fetches"] += 1
        self.lost_fetchers.append(fetch.fetcher)
        self.restores.extend((tag, False) for tag in reversed(fetch.tags))
        self.put_back(fetch.acks)


def pending_acks_of(*broker: object) -> PendingAcks:
    """Return this process's pending acks of the broker that these values identify."""
    return _BY_BROKER.setdefault((os.getpid(), *broker), PendingAcks())


def counts() -> dict[str, int]:
    """Sum what all channels of this process did: fetches, messages, acknowledgements, ..."""
    total: Counter[str] = Counter()
    for (pid, *_), pending in list(_BY_BROKER.items()):
        if pid == os.getpid():
            total.update(pending.counts)
    return dict(total)


def running_tags() -> frozenset[Any]:
    """Delivery tags of the requests that Celery's worker runs in this process."""
    from celery.worker.state import active_requests  # noqa: PLC0415 clients need no worker state

    return frozenset(request.message.delivery_tag for request in tuple(active_requests))
