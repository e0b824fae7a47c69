"""Looks after batches as wholes, in every worker, now and then. Never in a step's way."""

import asyncio
import logging
from collections.abc import Callable

from redis.exceptions import RedisError

from stepfleet.orchestrator.errors import AgentException
from stepfleet.orchestrator.store.batches.batches import Batches
from stepfleet.orchestrator.store.batches.requests import BatchRequests
from stepfleet.orchestrator.store.batches.upkeep import LOOK_SECONDS, BatchUpkeep
from stepfleet.orchestrator.store.opening.opening import OpenStore

log = logging.getLogger(__name__)


async def keep_up(store: OpenStore, jitter: Callable[[], float]) -> None:
    """Look after batches until cancelled. Trouble is logged and tried again at the next turn."""
    settings, batches = (
        store.settings,
        Batches(store.connection, store.keys, retention=store.settings.retention),
    )
    requests = BatchRequests(
        store.connection, store.keys, store.dispatch, batches, grace=settings.grace
    )
    upkeep = BatchUpkeep(
        store.connection, store.keys, retention=settings.retention, requests=requests
    )
    while True:
        await asyncio.sleep(LOOK_SECONDS * (0.8 + 0.4 * jitter()))
        try:
            await upkeep.look()
        except (AgentException, RedisError, OSError) as error:
            log.warning("the upkeep of batches is put off: %s", error)
        except Exception:
            log.exception("the upkeep of batches failed")
