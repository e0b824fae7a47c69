"""Tells, again and again, that a worker is there and what it does; `aclose` of services ends it."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import orjson
from celery import Celery
from redis.exceptions import RedisError

from stepfleet.orchestrator.agents.agent import Agent
from stepfleet.orchestrator.errors import AgentException
from stepfleet.orchestrator.store import keys
from stepfleet.orchestrator.store.opening.opening import OpenStore


def queues_told(app: Celery | None, agents: Iterable[Agent]) -> dict[str, Any]:
    """Return that as a part of its report; without an app it serves none.

    Celery may be told to serve others later.
    """
    return {
        "queues": sorted(app.amqp.queues.consume_from) if app else [],
        "tool_queues": sorted({queue for agent in agents for queue in agent.queues}),
    }


class Report:
    """What the worker `name` says of itself every `pause` seconds; `app` is None if it has none.

    `held` counts the steps that it holds.
    """

    def __init__(
        self,
        name: str,
        agents: Sequence[Agent],
        *,
        held: Callable[[], int],
        app: Celery | None,
        pause: float,
    ) -> None:
        self._name = name
        self._agents = agents
        self._held = held
        self._app = app
        self._pause = pause

    async def watch(self, opened: OpenStore) -> None:
        """Tell who is there, and again of the agents when a failover may have lost them."""
        announced = opened.connection.connects
        while True:
            with suppress(AgentException, RedisError):
                await self._tell(opened)
                if announced != (connects := opened.connection.connects):
                    for agent in self._agents:
                        await opened.configs.restore(agent.config)
                    announced = connects
            await asyncio.sleep(self._pause)

    async def _tell(self, opened: OpenStore) -> None:
        seen = {
            "held": self._held(),
            "slots": opened.settings.slots,
            "agents": sorted(agent.name for agent in self._agents),
            **queues_told(self._app, self._agents),
        }
        seen["seen"] = (await opened.connection.now()).timestamp()
        shown = orjson.dumps(seen).decode()
        await opened.connection.execute("HSET", keys.WORKERS, self._name, shown)
