"""A kombu Redis channel that fetches many messages, and acknowledges many, in one round trip.

Decides what one fetch requests and how its reply is delivered. Queues, bindings, publishing, fanout
and the sweep for the visibility timeout are kombu's own.

A delivery has a tag of its own, made by the fetch, not the publisher's: an acknowledgement that
arrives late, over another connection or after the message was delivered elsewhere, can only ever
end that delivery.
"""

import json
import logging
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from queue import Empty
from time import monotonic
from typing import Any
from uuid import uuid4

import redis
from redis.exceptions import NoScriptError, ResponseError

from stepfleet.orchestrator.redis_client.transient_errors import (
    OutageLog,
    TransientError,
    transient_error_of,
)
from stepfleet.orchestrator.store.fleet.quarantine import KEPT_BYTES, KEPT_ENTRIES
from stepfleet.worker.engine.transport.ack_buffer import (
    ACKS_PER_CALL,
    LOST_FETCHER,
    SHAPE_ERRORS,
    AckBufferChannel,
    LostFetch,
    script,
)
from stepfleet.worker.engine.transport.fast_json import encode_plain
from stepfleet.worker.engine.transport.guard import (
    BROADCAST_LIMIT,
    DECODED,
    MESSAGE_LIMIT,
    MessageRefused,
    examine,
    examine_broadcast,
)
from stepfleet.worker.engine.transport.kombu_types import (
    StockChannel,
    StockMessage,
    StockQoS,
    VirtualQoS,
    fixed_order,
)
from stepfleet.worker.engine.transport.poller import WAKEUP


class ExaminedMessage(StockMessage):
    """A message whose body was decoded when it was examined."""

    def _decode(self) -> Any:
        content = self._raw.get(DECODED)
        if content is None or self.content_type not in (self.accept or ()):
            return super()._decode()
        return content

    def serializable(self) -> Any:
        """Return the message as it goes back to its queue: with its body as text."""
        self.properties.setdefault("body_encoding", "base64")
        return super().serializable()


class QoS(StockQoS):
    """Prefetch credit of a channel; acknowledgements go through its buffer."""

    def append(self, message: Any, delivery_tag: str) -> None:
        """Count a delivery that the fetch has registered."""
        VirtualQoS.append(self, message, delivery_tag)

    def forget(self, delivery_tag: str) -> None:
        """Stop counting a delivery."""
        VirtualQoS.ack(self, delivery_tag)

    def ack(self, delivery_tag: str) -> None:
        """Acknowledge a delivery, from any thread, also after the channel's end."""
        self.forget(delivery_tag)
        self.channel.acknowledge(delivery_tag)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        """Drop the message, or restore it after the others."""
        self.forget(delivery_tag)
        if requeue:
            self.channel.restore_later(delivery_tag)
        else:
            self.channel.acknowledge(delivery_tag)

    def restore_by_tag(self, tag: Any, client: Any = None, leftmost: bool = False) -> None:  # noqa: ARG002 kombu's signature
        """Restore one message now (kombu's sweep for the visibility timeout calls this)."""
        self.channel.restore_message(tag, behind=leftmost)

    def restore_unacked(self, client: Any = None) -> None:  # noqa: ARG002 the same
        """Restore every message that is neither acknowledged nor still running."""
        self._flush()
        tags = list(self._delivered)
        self._delivered.clear()
        self.channel.restore_deliveries(tags)

    def credit(self, most: int) -> int:
        """How many messages may be fetched now, at most ``most``."""
        if not self.can_consume():
            return 0
        free = self.can_consume_max_estimate()
        return most if free is None else min(most, int(free))


logger = logging.getLogger("kombu.transport.redis")

_POLL_SECONDS = 0.05


class WakingChannel(AckBufferChannel):
    """A channel with wake-ups; where the server refuses them, it polls its queues often instead."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.tracks_keys = True
        self.next_fetch_at = 0.0  # monotonic; until then the queues are known to be empty
        self.woken = False  # since the last fetch was sent
        super().__init__(*args, **kwargs)

    @property
    def poll_seconds(self) -> float:
        """How long the queues need not be polled without a wake-up."""
        return (self.brpop_timeout or 1.0) if self.tracks_keys else _POLL_SECONDS

    @property
    def wakeups(self) -> Any:
        """Client of the connection that receives wake-ups."""
        if "ear" not in self.__dict__:
            self.__dict__["ear"] = redis.Redis(connection_pool=self.async_pool)
        return self.__dict__["ear"]

    def open_wakeups(self) -> None:
        """Subscribe to changes of the keys that fetches have read."""
        connection, fetching = self.wakeups.connection, self.client.connection
        try:
            own_id = send_command(connection, "CLIENT", "ID")
            send_command(connection, "SUBSCRIBE", "__redis__:invalidate")
            send_command(fetching, "CLIENT", "TRACKING", "OFF")
            send_command(fetching, "CLIENT", "TRACKING", "ON", "REDIRECT", own_id, "NOLOOP")
        except ResponseError as error:
            logger.warning(
                "The Redis server does not offer CLIENT TRACKING (%s): idle queues are polled"
                " every %s s instead. Redis 6 or later has it; an ACL user needs +client",
                error,
                _POLL_SECONDS,
            )
            self.tracks_keys = False
        connection._sock.settimeout(0)  # noqa: SLF001 the poller of kombu works on sockets, too

    def close_wakeups(self) -> None:
        """Drop the connection: it belongs to a fetching connection that is gone."""
        held = getattr(self.__dict__.get("ear"), "connection", None)
        if held is not None:
            held.disconnect()

    def on_wakeup(self) -> None:
        """Read a notification, which can only mean that there is something to fetch."""
        connection = self.wakeups.connection
        self.next_fetch_at = 0.0
        self.woken = True
        try:
            if not connection._sock.recv(65_536):  # noqa: SLF001 the content does not matter
                connection.disconnect()
        except (BlockingIOError, ssl.SSLWantReadError):
            pass
        except OSError:
            connection.disconnect()
        raise Empty

    def _poll_error(self, type: str, **options: Any) -> None:  # noqa: A002 kombu's signature
        self.handlers[type](**options)

    def _close_clients(self) -> None:
        super()._close_clients()
        wakeups = self.__dict__.pop("ear", None)
        if wakeups is not None and wakeups.connection is not None:
            connection, wakeups.connection = wakeups.connection, None
            connection.disconnect()


def send_command(connection: Any, *command: Any) -> Any:
    """Send one command over the connection and return its reply."""
    connection.send_command(*command)
    if str(getattr(connection, "protocol", 2)) == "3":
        return connection.read_response(push_request=command[0] == "SUBSCRIBE")
    return connection.read_response()


_BACK_OFF_SECONDS = 1.0
_ACKS_SECONDS = 0.02
"""How long acknowledgements wait for a fetch that takes messages, too: a call less for Redis."""
_REPLY_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Fetch:
    """One call of the fetch script: its tag, what it requests, the acknowledgements it carries."""

    tag: str
    queues: tuple[str, ...]
    wanted: int
    acks: tuple[str, ...]

    def tag_of(self, number: int) -> str:
        """Return the delivery tag of its message number 1, 2, ..."""
        return f"{self.tag}:{number}"

    def lost(self) -> LostFetch:
        """Return what is unknown when its reply does not arrive."""
        tags = tuple(self.tag_of(i + 1) for i in range(self.wanted))
        return LostFetch(self.tag.partition(":")[0], tags, self.acks)


class Channel(WakingChannel):
    """One channel; used from the thread of its connection, acknowledgements excepted."""

    QoS = QoS
    Message = ExaminedMessage

    #: Transport options (``broker_transport_options``), besides kombu's own: most messages, and
    #: bytes after which to stop, of one fetch, and the largest message in bytes.
    batch_messages = 100
    batch_bytes = 1024 * 1024
    message_limit = MESSAGE_LIMIT

    #: Seconds for which a worker that was killed in its sweep keeps the others from theirs: kombu's
    #: are 300. Two sweeps at once do no harm: one of them restores a message.
    unacked_mutex_expire = 10

    from_transport_options = (
        *StockChannel.from_transport_options,
        "batch_messages",
        "batch_bytes",
        "message_limit",
        "quarantine",
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._unregistered: set[str] = set()  # queues whose consumer needs no acknowledgement
        self._fetcher = ""
        self._fetches = 0
        self._sent: Fetch | None = None
        self._acks_due_at: float | None = None  # monotonic
        self._backing_off_until = 0.0  # monotonic; nothing is sent before
        self._watch = OutageLog("The broker")
        super().__init__(*args, **kwargs)
        self.handlers[WAKEUP] = self.on_wakeup

    # ------------------------------------------------------------------ the fetching connection

    def reset_connection(self) -> None:
        """Begin as a new fetcher: calls of the lost connection must have no effect any more."""
        self._fetcher = uuid4().hex
        self.next_fetch_at = 0.0
        self.close_wakeups()

    def prepare_connection(self) -> None:
        """Load the fetch script through the new fetching connection."""
        send_command(self.client.connection, "SCRIPT", "LOAD", script("fetch").text)

    def _on_connection_disconnect(self, connection: Any) -> None:
        if self._in_poll is connection:
            sent, self._sent = self._sent, None
            if sent is not None:
                self._pending.lost(sent.lost())
        super()._on_connection_disconnect(connection)

    # ------------------------------------------------------------------ fetching

    def wants_to_fetch(self) -> bool:
        """Whether a fetch is to be sent now: for messages, or for acknowledgements alone."""
        if self._in_poll or self._closing:
            return False
        now = monotonic()
        if now >= self.next_fetch_at and self.qos.credit(1) > 0:
            return True
        if not self._pending.acks:
            return False
        if self._acks_due_at is None:
            self._acks_due_at = now + _ACKS_SECONDS
            self._poll_within(_ACKS_SECONDS)
        return now >= self._acks_due_at

    def send_fetch(self) -> None:
        """Send the next fetch; the poller reads the reply."""
        asleep = monotonic() < self.next_fetch_at
        self._fetches += 1
        fetch = Fetch(
            tag=f"{self._fetcher}:{self._fetches}",
            queues=tuple(self._queue_cycle.consume(len(self.active_queues))),
            wanted=0 if asleep else self.qos.credit(self.batch_messages),
            acks=self._pending.take_acks(ACKS_PER_CALL),
        )
        self._sent = fetch
        self._acks_due_at = None
        self.woken = False
        self._in_poll = self.client.connection
        self._brpop_sent_at = monotonic()
        keys, args = self._script_call(fetch)
        self.client.connection.send_command("EVALSHA", script("fetch").sha, len(keys), *keys, *args)

    def _script_call(self, fetch: Fetch) -> tuple[list[str], list[Any]]:
        in_turn = not isinstance(self._queue_cycle, fixed_order)
        keys = [
            self.full_key(self._q_for_pri(queue, priority))
            for priority in self.priority_steps
            for queue in fetch.queues
        ]
        args = [
            *(self.full_key(self.unacked_index_key), self.full_key(self.unacked_key)),
            *(self.quarantine, self.full_key(LOST_FETCHER) + fetch.tag.partition(":")[0]),
            *(fetch.tag, fetch.wanted, self.batch_bytes, self.message_limit),
            *(int(in_turn), len(fetch.queues), KEPT_ENTRIES, KEPT_BYTES),
            *(self._entry_suffix(queue) for queue in fetch.queues),
            *fetch.acks,
        ]
        return keys, args

    def _entry_suffix(self, queue: str) -> str:
        """Return the end of an unacked entry in kombu's format: no exchange, the queue as key."""
        if queue in self._unregistered or not self.ack_emulation:
            return ""
        return f',"",{json.dumps(queue)}]'

    def read_reply(self, **options: Any) -> bool:
        """Read the reply of a fetch and deliver its messages; raises ``Empty`` without any."""
        try:
            reply = self.client.parse_response(self.client.connection, "EVALSHA", **options)
        except self.connection_errors:
            self.client.connection.disconnect()  # which notes the fetch as lost
            raise
        except ResponseError as error:
            self._on_refused(error)
            raise Empty from None
        finally:
            self._in_poll = None
            self._flush_brpop_reauth()
        sent, self._sent = self._sent, None
        if sent is None:
            raise Empty
        if self._watch.current is not None:
            self._watch.answered(monotonic())
        return self._deliver_reply(reply, sent)

    def _on_refused(self, error: ResponseError) -> None:
        """Continue after a refusal: the script has done nothing, or stopped at a wrong type.

        Messages that it had taken by then are restored after the visibility timeout.
        """
        sent, self._sent = self._sent, None
        if sent is not None:
            self._pending.put_back(sent.acks)
        self._in_poll = None
        if isinstance(error, NoScriptError):
            try:
                self.prepare_connection()
            except ResponseError as refusal:
                self.back_off(refusal)
        else:
            self.back_off(error)

    @property
    def backing_off(self) -> bool:
        """Whether Redis refused a command a moment ago, and gets none for now."""
        return monotonic() < self._backing_off_until

    def back_off(self, error: ResponseError) -> None:
        """Pause after a refusal; where it may come from a former master, reconnect afterwards."""
        now = monotonic()
        trouble = transient_error_of(error) or TransientError.REFUSES
        self._watch.failed(trouble, error, now)
        self._backing_off_until = now + _BACK_OFF_SECONDS
        self._fetch_again_in(_BACK_OFF_SECONDS)
        if trouble is TransientError.ELSEWHERE:
            if self.client.connection is not None:
                self.client.connection.disconnect()
            self.pool.disconnect(inuse_connections=False)

    def _fetch_again_in(self, seconds: float) -> None:
        self.next_fetch_at = monotonic() + seconds
        self._poll_within(seconds)

    def _poll_within(self, seconds: float) -> None:
        if self.connection.hub is not None:
            self.connection.poll_within(seconds)

    def _deliver_reply(self, reply: Sequence[Any], sent: Fetch) -> bool:
        exhausted, refused, *found = reply
        messages = list(zip(found[::2], found[1::2], strict=True))
        self._pending.counts.update(
            fetches=1, messages=len(messages), quarantined=refused, acknowledged=len(sent.acks)
        )
        if exhausted and not self.woken:  # a wake-up may arrive before this reply is read
            self._fetch_again_in(self.poll_seconds)
        if not messages:
            raise Empty
        taken = 0
        try:
            for queue, raw in messages:
                taken += 1
                self._deliver_one(raw, sent.queues[queue - 1], sent.tag_of(taken))
        finally:
            rest = range(len(messages), taken, -1)
            self._pending.restores.extend((sent.tag_of(number), False) for number in rest)
        self._queue_cycle.rotate(sent.queues[messages[-1][0] - 1])
        return True

    def _deliver_one(self, raw: bytes, queue: str, tag: str) -> None:
        try:
            message = examine(raw)
            message["properties"]["delivery_tag"] = tag
            self.connection.deliver(message, queue)
        except MessageRefused as refusal:
            self.dead_letter(raw, str(refusal), queue, tag)
        except SHAPE_ERRORS as error:
            if isinstance(error, OSError):
                raise
            logger.exception("Celery could not accept a message; it is in %s", self.quarantine)
            self.qos.forget(tag)
            self.dead_letter(raw, f"Celery could not take it: {error!r}"[:300], queue, tag)

    # kombu's poller and its health check know the fetch by these names
    _brpop_start = send_fetch
    _brpop_read = read_reply

    # ------------------------------------------------------------------ consumers

    def basic_consume(self, queue: str, no_ack: bool, *args: Any, **kwargs: Any) -> Any:
        """Consume; messages of a consumer without acknowledgements are not registered."""
        (self._unregistered.add if no_ack else self._unregistered.discard)(queue)
        self._consumed = True
        self.next_fetch_at = 0.0
        return super().basic_consume(queue, no_ack, *args, **kwargs)

    def _basic_cancel(self, consumer_tag: str) -> None:
        super()._basic_cancel(consumer_tag)
        if not self.active_queues:  # no fetch will carry them any more
            self.flush_acks()

    def basic_get(self, queue: str, no_ack: bool = False, **_: Any) -> Any:
        """Fetch one message in a call of its own; None where there is none."""
        fetch = Fetch(f"{uuid4().hex}:0", (queue,), 1, ())
        keys, args = self._script_call(fetch)
        if no_ack:
            args[-1] = ""
        _, _, *found = script("fetch").call(self.unprefixed, keys, args)
        with self.conn_or_acquire() as client:
            self._maybe_update_queues_expire(client, queue)
        if not found:
            return None
        raw, tag = found[1], fetch.tag_of(1)
        try:
            payload = examine(raw)
        except MessageRefused as refusal:
            self.dead_letter(raw, str(refusal), queue, tag)
            return None
        payload["properties"]["delivery_tag"] = tag
        message = self.Message(payload, channel=self)
        if not no_ack:
            self.qos.append(message, message.delivery_tag)
        return message

    def _receive_one(self, c: Any) -> Any:
        try:
            return super()._receive_one(c)
        except RecursionError:
            logger.warning("A broadcast message nests too deeply and was dropped")
            raise Empty from None

    def _handle_message(self, client: Any, r: Any) -> Any:
        payload = super()._handle_message(client, r)
        data = payload["data"]
        if isinstance(data, bytes | str) and len(data) > BROADCAST_LIMIT:
            logger.warning(
                "A broadcast message of %s bytes was dropped; %s fit", len(data), BROADCAST_LIMIT
            )
            payload["data"] = b""
        return payload

    def _deliver_fanout_message(self, message: Any, exchange: str) -> bool:
        try:
            examine_broadcast(message)
            return bool(super()._deliver_fanout_message(message, exchange))
        except SHAPE_ERRORS as error:
            logger.warning("A broadcast message could not be delivered and was dropped: %r", error)
            raise Empty from None

    # ------------------------------------------------------------------ publishing

    def _put_fanout(self, exchange: str, message: Any, routing_key: str, **options: Any) -> None:
        batch = options.get("_publish_batch")
        payload = encode_plain(message)
        topics = self._get_publish_topics(exchange, routing_key)
        if batch is not None:
            for topic in topics:
                batch.add("publish", topic, payload)
            return
        with self.conn_or_acquire() as client:
            for topic in topics:
                client.publish(topic, payload)

    # ------------------------------------------------------------------ end

    def close(self) -> None:
        """Restore what is neither acknowledged nor running, and close."""
        self._closing = True
        if not self.closed:
            self._end_fetch()
            # A channel often closes because its server is gone; another may have replaced it.
            self.pool.disconnect(inuse_connections=False)
            self.flush_acks()
            if self._qos is not None:
                self._qos.restore_unacked_once()
            if self._consumed:
                self.restore_deliveries(())
        super().close()

    def _end_fetch(self) -> None:
        """Read the reply of an open fetch, or abandon the fetch; deliver nothing of it."""
        sent, connection = self._sent, self._in_poll
        if sent is None or not connection:
            return
        try:
            connection._sock.settimeout(_REPLY_SECONDS)  # noqa: SLF001 older clients take no timeout
            _, _, *found = connection.read_response()
        except (*self.connection_errors, ResponseError):
            connection.disconnect()  # which notes the fetch as lost
        else:
            self._sent = self._in_poll = None
            self._restore_undelivered(sent, found)

    def _restore_undelivered(self, sent: Fetch, found: Sequence[Any]) -> None:
        messages = list(enumerate(zip(found[::2], found[1::2], strict=True), start=1))
        for number, (at, raw) in reversed(messages):
            queue = sent.queues[at - 1]
            if self._entry_suffix(queue):
                self._pending.restores.append((sent.tag_of(number), False))
            else:  # it is registered nowhere else
                self.unprefixed.rpush(self.full_key(queue), raw)
