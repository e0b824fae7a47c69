"""What a channel sends besides fetches: acknowledgements, messages to give back, the quarantine.

Decides when debts of the process's ledger are paid and how a message returns to its queues. Must
not know when messages are fetched.
"""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import redis
from redis.exceptions import ResponseError

from stepfleet.orchestrator.store.keys import QUARANTINE
from stepfleet.orchestrator.store.quarantine import KEPT_ENTRIES, entry
from stepfleet.worker.engine.transport.kombu_types import StockChannel, dumps, loads, to_text
from stepfleet.worker.engine.transport.pending_acks import (
    PendingAcks,
    pending_acks_of,
    running_tags,
)
from stepfleet.worker.engine.transport.scripts import script

logger = logging.getLogger("kombu.transport.redis")

GIVEN_UP = "sf:given-up:"
"""Prefix of the marks of fetchers that must take nothing any more."""

ACKS_PER_CALL = 1000
SHAPE_ERRORS = (TypeError, ValueError, LookupError, AttributeError, RecursionError)
"""What code raises that trusted a message's shape."""

_GIVEN_UP_SECONDS = 86_400


class AckBufferChannel(StockChannel):
    """A kombu Redis channel whose acknowledgements and returns go through the ledger."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._reused: Any = None
        self._consumed = False
        super().__init__(*args, **kwargs)
        info = self.connection.client
        self._ledger: PendingAcks = pending_acks_of(
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
    def plain(self) -> Any:
        """A client that leaves keys as they are: scripts and quarantine get whole key names."""
        known = self.__dict__.get("_plain")
        if known is None or known.connection_pool is not self.pool:
            known = self.__dict__["_plain"] = redis.Redis(connection_pool=self.pool)
        return known

    def whole(self, key: str) -> str:
        """Return the key's name with kombu's ``global_keyprefix``."""
        return f"{self.global_keyprefix}{key}"

    # ------------------------------------------------------------------ acknowledgements

    def acknowledge(self, tag: str) -> None:
        """Send an acknowledgement with the next fetch, or now where none will follow."""
        self._ledger.acknowledge(tag)
        if not self.closed and not self._fetches_go_on():
            self.flush_acks()

    def _fetches_go_on(self) -> bool:
        return bool(self.connection.hub and self.active_queues and not self._closing)

    def flush_acks(self) -> None:
        """Send what is owed; what cannot be sent stays owed."""
        while acks := self._ledger.take_acks(ACKS_PER_CALL):
            try:
                self._send_acks(acks)
            except (*self.connection_errors, ResponseError) as error:
                self._ledger.put_back(acks)
                logger.warning("%s acknowledgements will be sent later: %s", len(acks), error)
                return
            self._ledger.counts["acknowledged"] += len(acks)

    def _send_acks(self, acks: tuple[str, ...]) -> None:
        keys = [self.whole(self.unacked_index_key), self.whole(self.unacked_key)]
        # not a transaction, which a server that is out of memory refuses
        script("acknowledge").call(self.plain, keys, list(acks))

    # ------------------------------------------------------------------ messages that go back

    def restore_later(self, tag: str) -> None:
        """Give a message back behind the others, now or over the next connection."""
        self._ledger.returns.append((tag, True))
        if not self.closed:
            self.restore_pending()

    def restore_pending(self) -> None:
        """Give back what a lost connection, a rejection or a closed channel left to be given."""
        ledger = self._ledger
        while ledger.given_up:
            self.plain.set(GIVEN_UP + ledger.given_up[0], 1, ex=_GIVEN_UP_SECONDS)
            ledger.given_up.popleft()
        while ledger.returns:
            tag, behind = ledger.returns[0]
            self.restore_message(tag, behind=behind)
            ledger.returns.popleft()

    def restore_deliveries(self, tags: Iterable[str]) -> None:
        """Give back the deliveries of a channel that ends, except those that are still running."""
        ledger = self._ledger
        open_tags = {*tags, *ledger.carried} - set(ledger.acks)
        ledger.carried = open_tags & running_tags()
        to_return = sorted(open_tags - ledger.carried, key=_age, reverse=True)
        ledger.returns.extend((tag, False) for tag in to_return)
        try:
            self.restore_pending()
        except self.connection_errors as error:
            logger.warning("%s messages will be given back later: %s", len(ledger.returns), error)

    def restore_message(self, tag: Any, *, behind: bool) -> None:
        """Put a message back into its queues: behind the others, or as the next one."""
        stored = self.plain.hget(self.whole(self.unacked_key), tag)
        lists, payload = self._whereto(stored) if stored else ([], b"")
        keys = [self.unacked_index_key, self.unacked_key, *lists]
        given = script("give_back").call(
            self.plain, [self.whole(key) for key in keys], [tag, int(behind), payload]
        )
        self._ledger.counts["given_back"] += given

    def _whereto(self, stored: bytes) -> tuple[list[str], bytes | str]:
        try:
            message, exchange, routing_key = loads(to_text(stored))
            message["headers"]["redelivered"] = True
            message["properties"]["delivery_info"]["redelivered"] = True
            priority = self._get_message_priority(message, reverse=False)
            queues = self._lookup(exchange, routing_key)
            return [self._q_for_pri(queue, priority) for queue in queues], dumps(message)
        except SHAPE_ERRORS as error:
            about = entry(stored, f"could not be given back: {error!r}"[:300], "")
            self.plain.lpush(QUARANTINE, about)
            self.plain.ltrim(QUARANTINE, 0, KEPT_ENTRIES - 1)
            return [], b""

    def put_aside(self, made: bytes) -> None:
        """Keep the entry of a message that Celery has and cannot use; it is rejected apart."""
        with self.plain.pipeline() as pipe:
            pipe.lpush(QUARANTINE, made)
            pipe.ltrim(QUARANTINE, 0, KEPT_ENTRIES - 1)
            pipe.execute()
        self._ledger.counts["quarantined"] += 1

    def quarantine(self, raw: bytes, reason: str, queue: str, tag: str) -> None:
        """Move a delivery out of Celery's reach."""
        logger.warning("A message of queue %s went to %s: %s", queue, QUARANTINE, reason)
        with self.plain.pipeline() as pipe:
            pipe.lpush(QUARANTINE, entry(raw, reason, queue))
            pipe.ltrim(QUARANTINE, 0, KEPT_ENTRIES - 1)
            pipe.zrem(self.whole(self.unacked_index_key), tag)
            pipe.hdel(self.whole(self.unacked_key), tag)
            pipe.execute()
        self._ledger.counts["quarantined"] += 1


def _age(tag: str) -> tuple[int, ...]:
    return tuple(int(part) for part in tag.split(":")[1:] if part.isdigit())
