"""Task messages of steps: hints `(run_id, step)`, named after the agent for people to read.

The message is one that Celery and kombu built themselves, once; every further one is that
message with other ids. A contract test compares them with what `send_task` puts on the wire.
"""

import asyncio
import base64
from collections.abc import Sequence
from typing import Any, Protocol
from uuid import uuid4

import orjson
from celery import Celery
from kombu.exceptions import ChannelError

from stepfleet.orchestrator.protocol.claim import StepHint
from stepfleet.orchestrator.settings import TASK


def step_label(agent: str, step: int) -> str:
    """Return the name under which Flower shows the step (counted from 1)."""
    return f"{agent}: step {step + 1}"


class StepMessages:
    """Builds the wire form of step tasks for a Redis broker."""

    def __init__(self, queue: str) -> None:
        self._template = _celerys_own_message(queue)

    def build(self, hint: StepHint, agent: str) -> str:
        """Return the message (JSON) that makes a worker look at `hint`."""
        task_id = str(uuid4())
        args = [hint.run_id, hint.step]
        shown = repr(args)
        headers = {
            **self._template["headers"],
            "id": task_id,
            "root_id": task_id,
            "shadow": step_label(agent, hint.step),
            "argsrepr": shown,
        }
        properties = {
            **self._template["properties"],
            "correlation_id": task_id,
            "delivery_tag": str(uuid4()),
        }
        body = orjson.dumps([args, {}, _EMBED])
        message = {
            **self._template,
            "body": base64.b64encode(body).decode(),
            "headers": headers,
            "properties": properties,
        }
        return orjson.dumps(message).decode()


_NO_SUCH_QUEUE = "404"
_EMBED = {"callbacks": None, "errbacks": None, "chain": None, "chord": None}


def _celerys_own_message(queue: str) -> dict[str, Any]:
    app = Celery("stepfleet", broker="memory://", set_as_current=False)
    with app.connection_for_write() as connection:
        channel = connection.default_channel
        app.send_task(
            TASK,
            args=["run", 0],
            queue=queue,
            shadow="agent: step 1",
            ignore_result=True,
            connection=connection,
        )
        message: dict[str, Any] = channel._get(queue)  # noqa: SLF001 - the virtual transport's own
    message["properties"]["reply_to"] = ""
    return message


class Redis(Protocol):
    """What sends one command to the broker's Redis."""

    async def execute(self, *command: Any) -> Any:
        """Return the reply to one command."""


class Dispatch:
    """Gets hints to the workers: pushed inside scripts, or published by plain Celery.

    `in_script` is true where store and broker are one Redis.
    """

    def __init__(self, app: Celery, connection: Redis, queue: str, *, in_script: bool) -> None:
        self.queue = queue
        self.in_script = in_script
        self._app = app
        self._connection = connection
        self._messages = StepMessages(queue) if in_script else None

    @property
    def queue_key(self) -> str | None:
        """The broker list that scripts push to, or None where they do not."""
        return self.queue if self.in_script else None

    def message(self, hint: StepHint, agent: str) -> str:
        """Return what a script pushes for `hint`; empty where it is published afterwards."""
        return self._messages.build(hint, agent) if self._messages else ""

    async def publish(self, hints: Sequence[tuple[StepHint, str]]) -> None:
        """Send hints (each with its agent's name) now, ahead of runs that were not begun."""
        if not hints:
            return
        if self._messages:
            messages = [self._messages.build(hint, agent) for hint, agent in hints]
            await self._connection.execute("RPUSH", self.queue, *messages)
        else:
            await asyncio.to_thread(self._send, hints)

    async def published(self, hint: StepHint, agent: str) -> None:
        """Send `hint` unless the script has pushed it already."""
        if not self.in_script:
            await self.publish([(hint, agent)])

    async def waiting(self) -> int:
        """Return how many messages wait in the queue."""
        if self._messages:
            return int(await self._connection.execute("LLEN", self.queue))
        return await asyncio.to_thread(self._count)

    def _send(self, hints: Sequence[tuple[StepHint, str]]) -> None:
        with self._app.producer_or_acquire() as producer:
            for hint, agent in hints:
                self._app.send_task(
                    TASK,
                    args=[hint.run_id, hint.step],
                    queue=self.queue,
                    shadow=step_label(agent, hint.step),
                    ignore_result=True,
                    producer=producer,
                )

    def _count(self) -> int:
        with self._app.connection_for_read() as connection:
            try:
                declared = connection.default_channel.queue_declare(self.queue, passive=True)
            except ChannelError as error:
                # An empty list is no key in Redis, and kombu then knows no queue of that name.
                if str(error.reply_code) != _NO_SUCH_QUEUE:
                    raise
                return 0
            return int(declared.message_count)
