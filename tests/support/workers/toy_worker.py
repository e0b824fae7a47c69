"""Starts real Celery workers on tests/acceptance/toyapp and listens to what they tell.

Needs ``redis_servers`` for the server; knows nothing of what the tests check.
"""

# mypy: allow-untyped-calls

import contextlib
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kombu.pools
import redis
from celery import Celery
from support.deadlines import wait_until
from support.workers.celery_worker import CeleryWorker

TOYAPP = Path(__file__).parents[2] / "acceptance" / "toyapp"


class ToyWorker(CeleryWorker):
    """One ``celery -A toyapp worker`` process, its log and a client of its notes."""

    def __init__(
        self,
        folder: Path,
        broker: str,
        notes: str,
        *,
        name: str = "w1",
        options: tuple[str, ...] = (),
        settings: dict[str, object] | None = None,
        env: dict[str, str] | None = None,
    ) -> None:
        self.notes = redis.Redis.from_url(notes, decode_responses=True)
        self.settings = settings or {}
        told = {
            **os.environ,
            "PYTHONPATH": str(TOYAPP),
            "TOY_BROKER": broker,
            "TOY_REDIS": notes,
            "TOY_CONF": json.dumps(self.settings),
            **(env or {}),
        }
        super().__init__(
            folder, app="toyapp", name=f"{name}@toy", options=options, env=told, cwd=TOYAPP
        )

    def end(self) -> None:
        super().end()
        self.notes.close()

    def started(self, name: str) -> bool:
        """Whether the gate task of this name has begun to wait."""
        return name in self.notes.lrange("started", 0, -1)

    def open(self, name: str) -> None:
        """Let the gate task of this name go on."""
        self.notes.set(f"open:{name}", 1)


@contextlib.contextmanager
def client_app(broker: str, notes: str) -> Iterator[Celery]:
    """A Celery app that sends to the toy workers and reads their results; closed afterwards."""
    app = Celery("client", broker=broker, backend=notes, set_as_current=False)
    app.conf.update(task_default_queue="toy", broker_connection_retry_on_startup=True)
    try:
        yield app
    finally:
        app.backend.result_consumer.stop()
        app.backend.client.connection_pool.disconnect()
        kombu.pools.reset()
        app.close()


def until_heard(app: Celery, worker: ToyWorker) -> None:
    """Return when the worker hears remote control.

    It says that it is ready before it listens, and what nobody hears is not said again.
    """
    wait_until(
        lambda: app.control.ping([worker.name], timeout=1.0), what=f"an answer of {worker.name}"
    )


class Events:
    """Task events as a monitor receives them, from a thread of its own."""

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._seen: list[dict[str, Any]] = []
        self._ready = threading.Event()
        self._stop = False

    def of(self, task_id: str) -> list[str]:
        """Types of the events of one task, in order."""
        return [event["type"] for event in list(self._seen) if event.get("uuid") == task_id]

    def all(self, kind: str, count: int) -> list[dict[str, Any]]:
        """All events of one type, once there are so many; else none."""
        found = [event for event in list(self._seen) if event["type"] == kind]
        return found if len(found) >= count else []

    @contextlib.contextmanager
    def listening(self) -> Iterator["Events"]:
        thread = threading.Thread(target=self._listen, daemon=True)
        thread.start()
        assert self._ready.wait(60), "the event receiver did not connect"
        try:
            yield self
        finally:
            self._stop = True
            thread.join(60)

    def _listen(self) -> None:
        with self._app.connection_for_read() as connection:
            receiver = self._app.events.Receiver(connection, handlers={"*": self._seen.append})
            with receiver.consumer_context(wakeup=False) as (_, channel, _):
                self._drain_once(channel.connection.client)
                self._ready.set()
                while not self._stop:
                    self._drain_once(channel.connection.client)

    @staticmethod
    def _drain_once(connection: Any) -> None:
        with contextlib.suppress(TimeoutError):
            connection.drain_events(timeout=0.2)
