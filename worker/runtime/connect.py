"""Connects a worker to its store: checked, with scripts loaded and agents announced."""

import logging
import os
import socket
from collections.abc import Iterable
from contextlib import suppress

from stepfleet.orchestrator.agents.agent import Agent
from stepfleet.orchestrator.errors import AgentException
from stepfleet.orchestrator.store import keys
from stepfleet.orchestrator.store.fleet.health import server_info, warnings
from stepfleet.orchestrator.store.fleet.overview import forget_workers
from stepfleet.orchestrator.store.opening.opening import OpenStore
from stepfleet.orchestrator.store.runs.steps import StepStore, Terms
from stepfleet.worker.runtime.crash_points import Visit

log = logging.getLogger(__name__)


async def connect(
    opened: OpenStore, agents: Iterable[Agent], crash: Visit, worker: str
) -> StepStore:
    """Return the store of the steps of `worker`, over an open store. Raises `StoreError`."""
    for warning in warnings(await server_info(opened.connection)):
        log.warning(warning)
    settings = opened.settings
    terms = Terms(settings.lease, settings.grace, settings.retention, worker, settings.ledger_days)
    given = (opened.connection, opened.keys, opened.configs, opened.dispatch)
    store = StepStore(*given, terms, crash)
    await store.prepare()
    for agent in agents:
        await opened.configs.announce(agent.config)
    await forget_workers(opened)
    return store


async def disconnect(opened: OpenStore) -> None:
    """Sign off, and close the store."""
    with suppress(AgentException):
        await opened.connection.execute("HDEL", opened.keys.of(keys.WORKERS), process_name())
    await opened.aclose()


def child_name(node: str, pid: int) -> str:
    """Return the name of a child of the pool of the worker `node`."""
    return f"{node}:{pid}"


def process_name() -> str:
    """Return the name of this process among all of the fleet: host and process id."""
    return f"{socket.gethostname()}:{os.getpid()}"
