"""Keeps messages that Celery has received and cannot use: no task of this worker, no task at all.

Called in the consumer's thread, where no event loop runs. Must not know what makes a message bad.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from celery.utils.saferepr import saferepr

from stepfleet.orchestrator.errors import AgentException
from stepfleet.orchestrator.settings.settings import Settings
from stepfleet.orchestrator.store.opening.opening import client_app, open_store
from stepfleet.orchestrator.store.quarantine import KEPT_BYTES, entry, keep_aside
from stepfleet.worker.engine.transport.ack_buffer import AckBufferChannel

log = logging.getLogger(__name__)

_SHOWN = 200
_PATIENCE_SECONDS = 2.0


def dead_letter_receiver(settings: Settings) -> Callable[..., None]:
    """Return a receiver of Celery's signals `task_unknown` and `task_rejected`."""

    def receive(message: Any = None, exc: Any = None, name: Any = None, **_: Any) -> None:
        queue = str((message.delivery_info or {}).get("routing_key"))[:_SHOWN]
        why = f"this worker has no task {name!r}" if name is not None else _why(exc)
        made = entry(_shown(message), why[:_SHOWN], queue)
        log.warning("a message of queue %s was put aside: %s", queue, why[:_SHOWN])
        if isinstance(message.channel, AckBufferChannel):
            message.channel.add_dead_letter(made)
            return
        try:
            asyncio.run(_keep(settings, made))
        except (AgentException, OSError) as error:
            log.warning("it is lost, as the store is away: %s", error)

    return receive


async def _keep(settings: Settings, made: bytes) -> None:
    quick = settings.model_copy(update={"patience": _PATIENCE_SECONDS})
    store = await open_store(quick, client_app(quick))
    try:
        await keep_aside(store.connection, made)
    finally:
        await store.aclose()


def _why(exc: Any) -> str:
    return "the message asks for no task" if exc is None else f"Celery could not take it: {exc}"


def _shown(message: Any) -> bytes:
    shown: str = saferepr({"headers": message.headers, "body": message.body}, maxlen=KEPT_BYTES)
    return shown.encode("ascii", "backslashreplace")
