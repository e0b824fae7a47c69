"""Connects a worker to its store: checked, with scripts loaded and agents announced."""

import logging
import os
import socket
from collections.abc import Iterable
from contextlib import suppress

from stepfleet.orchestrator.agents.agent import Agent
from stepfleet.orchestrator.errors import AgentException
from stepfleet.orchestrator.store import keys
from stepfleet.orchestrator.store.fleet.overview import forget_workers
from stepfleet.orchestrator.store.fleet.servers import server_info, warnings
from stepfleet.orchestrator.store.store import Store

log = logging.getLogger(__name__)


async def connect(opened: Store, agents: Iterable[Agent]) -> None:
    """Check the server, load scripts and announce agents. Raises `StoreError`."""
    for warning in warnings(await server_info(opened.connection)):
        log.warning(warning)
    await opened.steps.prepare()
    for agent in agents:
        await opened.configs.announce(agent.config)
    await forget_workers(opened)


async def disconnect(opened: Store) -> None:
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
