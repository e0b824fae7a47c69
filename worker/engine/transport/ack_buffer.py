"""Everything that a channel sends besides fetches: acknowledgements, restores, dead letters.

Decides when pending acknowledgements are sent and how a message is restored to its queues. Must
not know when messages are fetched.
"""

import functools
import hashlib
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from typing import Any

import redis
from redis.exceptions import NoScriptError, ResponseError

from stepfleet.orchestrator.store.fleet.quarantine import KEPT_ENTRIES, entry
from stepfleet.orchestrator.store.keys import QUARANTINE
from stepfleet.worker.engine.transport.kombu_types import StockChannel, dumps, loads, to_text
from stepfleet.worker.engine.transport.pending_acks import (
    PendingAcks,
    pending_acks_of,
    running_tags,
)


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
    """Return the script of the file ``name.lua`` beside this module."""
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
        """Restore a message behind the others, now or over the next connection."""
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
        """Put a message back into its queues: behind the others, or as the next one."""
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
