"""Task messages of steps: hints `(run_id, step)` under labels for people, and their broker.

Celery and kombu build the first message; all others are copies of it with other ids. A contract
test compares them with those that `send_task` puts on the wire.
"""

import asyncio
import base64
import binascii
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import orjson
from celery import Celery
from kombu.exceptions import ChannelError, OperationalError
from kombu.pools import connections, producers
from kombu.transport import TRANSPORT_ALIASES
from kombu.utils.collections import eqhash
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from stepfleet.orchestrator.errors import ConfigurationError, StoreError
from stepfleet.orchestrator.protocol.claim import Work
from stepfleet.orchestrator.records.calls.answers import awaited_by
from stepfleet.orchestrator.redis_client.sentinel import sentinel_options
from stepfleet.orchestrator.redis_client.transient_errors import OutageLog, TransientError
from stepfleet.orchestrator.redis_client.urls import (
    SentinelUrl,
    is_sentinel,
    parse_sentinel,
)
from stepfleet.orchestrator.settings.settings import TASK, TOOL_TASK, Settings
from stepfleet.orchestrator.settings.signing import HEADER, SigningKeys

REST_SECONDS = 2.0
"""How long no message is sent after the broker could not be reached."""

_Task = tuple[str, str, list[Any], str]
"""Name of a task, its queue, its arguments, and its label in Flower."""
BROKER_ERRORS = (OperationalError, ChannelError, RedisError, OSError)
_NO_SUCH_QUEUE = "404"
_EMBED = {"callbacks": None, "errbacks": None, "chain": None, "chord": None}
_LEFT: list[object] = []
SILENCE_SECONDS = 5.0
"""How long a server may be silent before its connection counts as dead."""
_OURS = ("unix://", "redis-batch", "rediss-batch")
_REDIS = re.compile(r"(rediss?|unix|redis(s?-batch|\+socket|-batch\+socket))://")
# kombu's own defaults wait for ever for a server that has stopped in its tracks.
_BOUNDED = {
    "socket_timeout": SILENCE_SECONDS,
    "socket_connect_timeout": SILENCE_SECONDS,
    "health_check_interval": SILENCE_SECONDS,
}
# For publishers: kombu's default tries for ever to connect, and its caller waits.
_IMPATIENT = {"max_retries": 1, "interval_start": 0.1, "interval_step": 0.2, "interval_max": 0.5}


def step_label(agent: str, step: int) -> str:
    """Return the name under which Flower shows the step (counted from 1)."""
    return f"{agent}: step {step + 1}"


def run_in(raw: str) -> str | None:
    """Return the run of a task message; None for a message of others."""
    try:
        message: Mapping[str, str] = orjson.loads(raw)
        run_id = orjson.loads(base64.b64decode(message["body"]))[0][0]
    except (orjson.JSONDecodeError, binascii.Error, LookupError, TypeError, ValueError):
        return None
    return run_id if isinstance(run_id, str) else None


def call_label(agent: str, step: int, tool: str) -> str:
    """Return the name under which Flower shows a tool call of the step (counted from 1)."""
    return f"{step_label(agent, step)}, {tool}"


@dataclass(frozen=True, slots=True)
class CallTask:
    """A tool call to dispatch, its queue, and its label in Flower."""

    work: Work
    queue: str
    label: str


class TaskMessages:
    """Builds the wire form of one task's messages for one queue of a Redis broker."""

    def __init__(self, queue: str, task: str = TASK, signing: SigningKeys | None = None) -> None:
        self._queue = queue
        self._task = task
        self._signing = signing
        message = _celerys_own_message(queue, task)
        message["body"] = "\0body"
        message["headers"] |= {"id": "\0id", "root_id": "\0id"}
        message["headers"] |= {"shadow": "\0label", "argsrepr": "\0args"}
        message["headers"] |= {HEADER: "\0signature"} if signing else {}
        message["properties"] |= {"correlation_id": "\0id", "delivery_tag": "\0tag"}
        self._pieces = re.split(r'"\\u0000(\w+)"', orjson.dumps(message).decode())
        """Its text, with the names of what differs between the pieces that do not."""

    def of(self, work: Work, label: str) -> str:
        """Return the message (JSON) that makes a worker look at `work`, shown as `label`."""
        args = work.args
        signature = self._signing.sign(self._task, self._queue, args) if self._signing else ""
        own = {
            "id": f'"{_random_id()}"',
            "tag": f'"{_random_id()}"',
            "body": f'"{base64.b64encode(orjson.dumps([args, {}, _EMBED])).decode()}"',
            "label": orjson.dumps(label).decode(),
            "args": orjson.dumps(repr(args)).decode(),
            "signature": orjson.dumps(signature).decode(),
        }
        pieces = self._pieces.copy()
        pieces[1::2] = [own[name] for name in pieces[1::2]]
        return "".join(pieces)


def _random_id() -> str:
    """Return the text of a random UUID; `uuid4` takes four times as long."""
    digits = os.urandom(16).hex()
    variant = "89ab"[int(digits[16], 16) & 3]
    return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-{variant}{digits[17:20]}-{digits[20:]}"


def _celerys_own_message(queue: str, task: str) -> dict[str, Any]:
    example = Work("run", 0, 0 if task == TOOL_TASK else None)
    app = Celery("stepfleet", broker="memory://", set_as_current=False)
    # Named here too: CELERY_BROKER_URL, which `celery --broker` sets, overrides that of the app.
    with app.connection_for_write("memory://") as connection:
        channel = connection.default_channel
        app.send_task(
            task,
            args=example.args,
            queue=queue,
            shadow="agent: step 1",
            ignore_result=True,
            connection=connection,
        )
        message: dict[str, Any] = channel._get(queue)  # noqa: SLF001 - the virtual transport's own
    message["properties"]["reply_to"] = ""
    return message


class Redis(Protocol):
    """Sends one command to the Redis of the broker."""

    async def execute(self, *command: Any) -> Any:
        """Return the reply to one command."""


class Dispatch:
    """Gets hints to the workers: pushed inside scripts, or published by plain Celery.

    `in_script` is true where store and broker are one Redis; `signing` signs every message;
    `prefix` begins the names of a Redis broker's lists.
    """

    def __init__(
        self,
        app: Celery,
        connection: Redis,
        queue: str,
        *,
        in_script: bool,
        signing: SigningKeys | None = None,
        prefix: str = "",
    ) -> None:
        self.queue = queue
        self._prefix = prefix
        self.in_script = in_script
        self._app = app
        self._rests_until = 0.0
        self._watch = OutageLog("The broker, for publishing,")
        self._connection = connection
        self._signing = signing
        self._messages = TaskMessages(queue, signing=signing) if in_script else None
        self._calls: dict[str, TaskMessages] = {}

    @property
    def queue_key(self) -> str | None:
        """The broker list that scripts push to, or None where they do not."""
        return self.key_of(self.queue) if self.in_script else None

    def key_of(self, queue: str) -> str:
        """Return the list of a Redis broker that holds a queue's messages."""
        return self._prefix + queue

    def message(self, hint: Work, agent: str) -> str:
        """Return the message that a script pushes; empty where it is published afterwards."""
        return self._messages.of(hint, step_label(agent, hint.step)) if self._messages else ""

    async def publish(self, hints: Sequence[tuple[Work, str]], *, behind: bool = False) -> None:
        """Send hints (each with its agent's name) now, ahead of runs that have not begun.

        `behind` sends them to the end of the queue, like those of new runs.
        """
        if not hints:
            return
        if self._messages:
            messages = [self.message(hint, agent) for hint, agent in hints]
            push = "LPUSH" if behind else "RPUSH"
            await self._connection.execute(push, self.key_of(self.queue), *messages)
        else:
            await self._publish(
                (TASK, self.queue, hint.args, step_label(agent, hint.step)) for hint, agent in hints
            )

    async def published(self, hint: Work, agent: str) -> None:
        """Send `hint` unless the script has pushed it already."""
        if not self.in_script:
            await self.publish([(hint, agent)])

    def call_message(self, call: CallTask) -> str:
        """Return the message that a script pushes for a tool call; empty as that of `message`."""
        if not self.in_script:
            return ""
        queue = self.queue_of(call)
        if queue not in self._calls:
            self._calls[queue] = TaskMessages(queue, TOOL_TASK, self._signing)
        return self._calls[queue].of(call.work, call.label)

    def queue_of(self, call: CallTask) -> str:
        """Return the queue of a call's task: a call that no tool's worker makes goes with steps."""
        return self.queue if awaited_by(call.queue) else call.queue

    async def publish_calls(self, calls: Sequence[CallTask]) -> None:
        """Send tasks of tool calls now, each to the head of its own queue."""
        if not calls:
            return
        if self.in_script:
            pushes = [
                ("RPUSH", self.key_of(self.queue_of(call)), self.call_message(call))
                for call in calls
            ]
            await asyncio.gather(*(self._connection.execute(*push) for push in pushes))
        else:
            await self._publish(
                (TOOL_TASK, self.queue_of(one), one.work.args, one.label) for one in calls
            )

    async def waiting(self) -> int:
        """Return how many messages wait in the queue."""
        if self._messages:
            return int(await self._connection.execute("LLEN", self.key_of(self.queue)))
        try:
            return await asyncio.to_thread(self._count)
        except BROKER_ERRORS as error:
            raise StoreError(f"the broker cannot be reached: {error}") from None

    async def _publish(self, tasks: Iterable[_Task]) -> None:
        """Send tasks by Celery.

        A broker that is away raises no error, and no caller waits for it: the rescuer sends the
        tasks again.
        """
        if time.monotonic() < self._rests_until:
            return
        try:
            await asyncio.to_thread(self._send, tasks)
        except BROKER_ERRORS as error:
            self._rests_until = time.monotonic() + REST_SECONDS
            self._watch.failed(TransientError.AWAY, error, time.monotonic())
        else:
            self._watch.answered(time.monotonic())

    def _send(self, tasks: Iterable[_Task]) -> None:
        with self._app.producer_or_acquire() as producer:
            for task, queue, args, label in tasks:
                signature = self._signing.sign(task, queue, args) if self._signing else None
                self._app.send_task(
                    task,
                    args=args,
                    headers={HEADER: signature} if signature else None,
                    queue=queue,
                    shadow=label,
                    ignore_result=True,
                    serializer="json",
                    producer=producer,
                )

    def _count(self) -> int:
        with self._app.connection_for_read() as connection:
            connection.ensure_connection(max_retries=1, interval_start=0)
            try:
                declared = connection.default_channel.queue_declare(self.queue, passive=True)
            except ChannelError as error:
                # Redis drops the key of an empty list, and kombu then knows no queue of that name.
                if str(error.reply_code) != _NO_SUCH_QUEUE:
                    raise
                return 0
            return int(declared.message_count)


def celery_app(settings: Settings, **conf: Any) -> Celery:
    """Return a Celery app that sends and accepts JSON only and keeps no results."""
    app = Celery("stepfleet", broker=kombu_url(settings.broker), set_as_current=False)
    own = kombu_conf(settings.broker, settings.queue_prefix)
    own["broker_transport_options"] |= conf.pop("broker_transport_options", {})
    app.conf.update(
        **own,
        task_serializer="json",
        accept_content=["json"],
        result_backend=None,
        task_ignore_result=True,
        task_default_queue=settings.queue,
        broker_connection_retry_on_startup=True,
        **conf,
    )
    return app


def client_app(settings: Settings) -> Celery:
    """Return the Celery app of a client, which only sends: plain transports, short waits."""
    app = celery_app(settings, broker_connection_timeout=SILENCE_SECONDS)
    # A worker's batched transport reads the same lists; kombu's own suffices to write to them.
    app.conf.broker_url = re.sub(r"^(rediss?)-batch", r"\1", kombu_url(settings.broker))
    return app


def forget_pools(app: Celery) -> None:
    """Leave the connections that an app publishes by to the process that this one was forked of.

    kombu shares its pools by address, so a new app would find them again. Nothing is closed.
    """
    with suppress(Exception):  # whatever a transport says about its address
        address = app.connection_for_write()
        found = eqhash(address)  # type: ignore[no-untyped-call]
        _LEFT.extend(dict.pop(pools, found, None) for pools in (connections, producers))


def kombu_url(url: str) -> str:
    """Return a broker URL as kombu writes it.

    It has a scheme of its own for unix sockets, and a whole URL for each Sentinel. Raises
    `ConfigurationError` for an unusable Sentinel URL, and a scheme that kombu does not know.
    """
    if is_sentinel(url):
        return ";".join(sentinels_of(url).one_by_one())
    scheme = url.partition("://")[0]
    known = {scheme, scheme.partition("+")[0]} & TRANSPORT_ALIASES.keys()
    if not (known or "." in scheme or url.startswith(_OURS)):
        msg = (
            "kombu does not know the transport of the broker's URL: write redis://, rediss://,"
            " sentinel:// or amqp:// (RabbitMQ)"
        )
        raise ConfigurationError(msg)
    if not url.startswith("unix://"):
        return url
    path = re.sub(r"([?&])db=", r"\1virtual_host=", url.removeprefix("unix://"))
    return f"redis+socket://{path}"


def kombu_conf(url: str, prefix: str = "") -> dict[str, Any]:
    """Return the Celery settings that a broker needs besides its URL.

    `prefix` begins the keys of a Redis; other brokers have none.

    Raises `ConfigurationError` for an unusable Sentinel URL.
    """
    named = {"global_keyprefix": prefix} if prefix else {}
    if is_sentinel(url):
        conf = _sentinel_conf(sentinels_of(url))
        conf["broker_transport_options"] |= named
        return conf
    bounded = {**_BOUNDED, **named} if _REDIS.match(url) else {}
    return {"broker_transport_options": {**_IMPATIENT, **bounded}}


def _sentinel_conf(parsed: SentinelUrl) -> dict[str, Any]:
    options = {
        **_IMPATIENT,
        **_BOUNDED,
        "master_name": parsed.service,
        "sentinels": list(parsed.sentinels),
        "sentinel_kwargs": {**sentinel_options(parsed), "retry": Retry(NoBackoff(), 0)},
    }
    conf: dict[str, Any] = {"broker_transport_options": options}
    if parsed.tls is not None:
        conf["broker_use_ssl"] = {"ssl_cert_reqs": "required", **parsed.tls}
    return conf


def sentinels_of(url: str) -> SentinelUrl:
    """Return a broker's Sentinels. Raises `ConfigurationError` for an unusable URL."""
    try:
        return parse_sentinel(url)
    except ValueError as error:
        raise ConfigurationError(f"the broker's URL cannot be used: {error}") from None
