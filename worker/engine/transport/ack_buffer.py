"""Everything that a channel sends besides fetches: acknowledgements, restores, dead letters.

Decides when pending acknowledgements are sent and how a message is restored to its queues. Must
not know when messages are fetched.
"""

import functools
import hashlib
import logging
import os
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import redis
from redis.exceptions import NoScriptError, ResponseError

from stepfleet.orchestrator.store.fleet.quarantine import KEPT_ENTRIES, entry
from stepfleet.orchestrator.store.keys import QUARANTINE
from stepfleet.worker.engine.transport.kombu_types import StockChannel, dumps, loads, to_text

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
    restores: deque[tuple[str, bool]] = field(default_factory=deque)  # tag, after the others
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


@dataclass(frozen=True, slots=True)
class Script:
    """One script: its text and the digest by which Redis knows it."""

    text: str
    sha: str

    def call(self, client: Any, keys: list[str], args: list[Any]) -> Any:
        """Run it and return the answer; loads it where the server has forgotten it."""
        try:
            return client.evalsha(self.sha, len(keys), *keys, *args)
        except NoScriptError:
            return client.eval(self.text, len(keys), *keys, *args)


@functools.cache
def script(name: str) -> Script:
    """Return the script of the file ``name.lua`` in this folder."""
    text = resources.files(__package__).joinpath(f"{name}.lua").read_text("utf-8")
    return Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


logger = logging.getLogger("kombu.transport.redis")

LOST_FETCHER = "sf:given-up:"
"""Prefix of the marks of fetchers that must not take anything any more."""

ACKS_PER_CALL = 1000
SHAPE_ERRORS = (TypeError, ValueError, LookupError, AttributeError, RecursionError)
"""Errors of code that trusted a message's shape."""

_LOST_FETCHER_SECONDS = 86_400


class AckBufferChannel(StockChannel):
    """A kombu Redis channel that buffers acknowledgements and restores until they can be sent."""

    #: Transport option: the key of the fleet's dead letters.
    quarantine = QUARANTINE

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._reused: Any = None
        self._consumed = False
        super().__init__(*args, **kwargs)
        info = self.connection.client
        self._pending: PendingAcks = pending_acks_of(
            info.hostname, info.port, info.virtual_host, self.global_keyprefix, self.unacked_key
        )

    @contextmanager
    def conn_or_acquire(self, client: Any = None) -> Iterator[Any]:
        """Yield one client for all calls: building one costs as much as a round trip."""
        if client is None and self._reused is None:
            self._reused = self._create_client()
        yield client or self._reused

    def _disconnect_pools(self) -> None:
        self._reused = None
        super()._disconnect_pools()

    @property
    def unprefixed(self) -> Any:
        """A client that adds no prefix: scripts and dead letters get full key names."""
        known = self.__dict__.get("_unprefixed")
        if known is None or known.connection_pool is not self.pool:
            known = self.__dict__["_unprefixed"] = redis.Redis(connection_pool=self.pool)
        return known

    def full_key(self, key: str) -> str:
        """Return the key's name with kombu's ``global_keyprefix``."""
        return f"{self.global_keyprefix}{key}"

    # ------------------------------------------------------------------ acknowledge

    def acknowledge(self, tag: str) -> None:
        """Send an acknowledgement with the next fetch, or now where none will follow."""
        self._pending.acknowledge(tag)
        if not self.closed and not self._fetches_go_on():
            self.flush_acks()

    def _fetches_go_on(self) -> bool:
        return bool(self.connection.hub and self.active_queues and not self._closing)

    def flush_acks(self) -> None:
        """Send the pending acknowledgements; those that cannot be sent stay pending."""
        # not a transaction, which a server that is out of memory refuses
        keys = [self.full_key(self.unacked_index_key), self.full_key(self.unacked_key)]
        while acks := self._pending.take_acks(ACKS_PER_CALL):
            try:
                script("acknowledge").call(self.unprefixed, keys, list(acks))
            except (*self.connection_errors, ResponseError) as error:
                self._pending.put_back(acks)
                logger.warning("%s acknowledgements will be sent later: %s", len(acks), error)
                return
            self._pending.counts["acknowledged"] += len(acks)

    # ------------------------------------------------------------------ restore

    def restore_later(self, tag: str) -> None:
        """Restore a message after the others, now or over the next connection."""
        self._pending.restores.append((tag, True))
        if not self.closed:
            self.restore_pending()

    def restore_pending(self) -> None:
        """Restore what a lost connection, a rejection or a closed channel left to restore."""
        pending = self._pending
        while pending.lost_fetchers:
            mark = self.full_key(LOST_FETCHER) + pending.lost_fetchers[0]
            self.unprefixed.set(mark, 1, ex=_LOST_FETCHER_SECONDS)
            pending.lost_fetchers.popleft()
        while pending.restores:
            tag, behind = pending.restores[0]
            self.restore_message(tag, behind=behind)
            pending.restores.popleft()

    def restore_deliveries(self, tags: Iterable[str]) -> None:
        """Restore the deliveries of a channel that ends, except those that are still running."""
        pending = self._pending
        open_tags = {*tags, *pending.running} - set(pending.acks)
        pending.running = open_tags & running_tags()
        to_restore = sorted(open_tags - pending.running, key=_age, reverse=True)
        pending.restores.extend((tag, False) for tag in to_restore)
        try:
            self.restore_pending()
        except self.connection_errors as error:
            logger.warning("%s messages will be restored later: %s", len(pending.restores), error)

    def restore_message(self, tag: Any, *, behind: bool) -> None:
        """Put a message back into its queues: after the others, or as the next one."""
        stored = self.unprefixed.hget(self.full_key(self.unacked_key), tag)
        lists, payload = self._destination(stored) if stored else ([], b"")
        keys = [self.unacked_index_key, self.unacked_key, *lists]
        restored = script("restore").call(
            self.unprefixed, [self.full_key(key) for key in keys], [tag, int(behind), payload]
        )
        self._pending.counts["given_back"] += restored

    def _destination(self, stored: bytes) -> tuple[list[str], bytes | str]:
        try:
            message, exchange, routing_key = loads(to_text(stored))
            message["headers"]["redelivered"] = True
            message["properties"]["delivery_info"]["redelivered"] = True
            priority = self._get_message_priority(message, reverse=False)
            queues = self._lookup(exchange, routing_key)
            return [self._q_for_pri(queue, priority) for queue in queues], dumps(message)
        except SHAPE_ERRORS as error:
            self.add_dead_letter(entry(stored, f"could not be given back: {error!r}"[:300], ""))
            return [], b""

    # ------------------------------------------------------------------ dead letters

    def add_dead_letter(self, made: bytes, tag: str | None = None) -> None:
        """Keep an entry of `store.quarantine`; with ``tag``, end that delivery with it."""
        with self.unprefixed.pipeline() as pipe:
            pipe.lpush(self.quarantine, made)
            pipe.ltrim(self.quarantine, 0, KEPT_ENTRIES - 1)
            if tag is not None:
                pipe.zrem(self.full_key(self.unacked_index_key), tag)
                pipe.hdel(self.full_key(self.unacked_key), tag)
            pipe.execute()
        self._pending.counts["quarantined"] += 1

    def dead_letter(self, raw: bytes, reason: str, queue: str, tag: str) -> None:
        """Move a delivery out of Celery's reach."""
        logger.warning("A message of queue %s went to %s: %s", queue, self.quarantine, reason)
        self.add_dead_letter(entry(raw, reason, queue), tag)


def _age(tag: str) -> tuple[int, ...]:
    return tuple(int(part) for part in tag.split(":")[1:] if part.isdigit())
