"""Removes, now and then, what the fleet's records do not need any more. Never in a step's way."""

import asyncio
import logging

from redis.exceptions import RedisError

from stepfleet.orchestrator.errors import AgentException
from stepfleet.orchestrator.store.config_gc import forget_configs
from stepfleet.orchestrator.store.fleet_overview import forget_workers
from stepfleet.orchestrator.store.opening.opening import OpenStore

log = logging.getLogger(__name__)

FIRST_SECONDS = 60.0
"""A worker that has just started has better things to do."""
PAUSE_SECONDS = 3600.0


async def tidy(store: OpenStore) -> None:
    """Tidy up until cancelled. Trouble is logged and tried again at the next turn."""
    pause = FIRST_SECONDS
    while True:
        await asyncio.sleep(pause)
        pause = PAUSE_SECONDS
        try:
            await forget_workers(store)
            if gone := await forget_configs(store):
                log.info("forgot %d configurations that no run refers to", gone)
        except (AgentException, RedisError, OSError) as error:
            log.warning("tidying put off: %s", error)
        except Exception:
            log.exception("tidying failed")
