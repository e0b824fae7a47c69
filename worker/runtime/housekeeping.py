"""Housekeeping of the fleet's records and batches, in every worker. Never in a step's way."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from redis.exceptions import RedisError

from stepfleet.orchestrator.errors import AgentException
from stepfleet.orchestrator.store.batches.batches import Batches
from stepfleet.orchestrator.store.batches.requests import BatchRequests
from stepfleet.orchestrator.store.batches.upkeep import LOOK_SECONDS, BatchUpkeep
from stepfleet.orchestrator.store.config_gc import forget_configs
from stepfleet.orchestrator.store.fleet_overview import forget_workers
from stepfleet.orchestrator.store.opening.opening import OpenStore

log = logging.getLogger(__name__)

FIRST_SECONDS = 60.0
"""A worker that has just started has better things to do."""
PAUSE_SECONDS = 3600.0


async def keep_records(store: OpenStore) -> None:
    """Remove what the fleet's records do not need any more, until cancelled."""

    async def look() -> None:
        await forget_workers(store)
        if gone := await forget_configs(store):
            log.info("forgot %d configurations that no run refers to", gone)

    await asyncio.sleep(FIRST_SECONDS)
    while True:
        await _attempt("the housekeeping of records", look)
        await asyncio.sleep(PAUSE_SECONDS)


async def keep_batches(store: OpenStore, jitter: Callable[[], float]) -> None:
    """Look after batches as wholes, until cancelled."""
    connection, fleet_keys, settings = store.connection, store.keys, store.settings
    batches = Batches(connection, fleet_keys, retention=settings.retention)
    requests = BatchRequests(connection, fleet_keys, store.dispatch, batches, grace=settings.grace)
    upkeep = BatchUpkeep(connection, fleet_keys, retention=settings.retention, requests=requests)
    while True:
        await asyncio.sleep(LOOK_SECONDS * (0.8 + 0.4 * jitter()))
        await _attempt("the housekeeping of batches", upkeep.look)


async def _attempt(what: str, look: Callable[[], Awaitable[object]]) -> None:
    """Look once; errors are logged, and the next turn tries again."""
    try:
        await look()
    except (AgentException, RedisError, OSError) as error:
        log.warning("%s is put off: %s", what, error)
    except Exception:
        log.exception("%s failed", what)
