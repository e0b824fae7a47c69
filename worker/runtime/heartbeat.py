"""Reports regularly that a worker is alive and what it does; its end signs it off."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

import orjson
from celery import Celery
from redis.exceptions import RedisError

from stepfleet.orchestrator.agents.agent import Agent
from stepfleet.orchestrator.errors import AgentException
from stepfleet.orchestrator.store import keys
from stepfleet.orchestrator.store.opening.opening import OpenStore


class Heartbeat:
    """Reports on the worker `name` every `pause` seconds. `held` counts the steps that it holds."""

    def __init__(
        self,
        name: str,
        agents: Sequence[Agent],
        *,
        held: Callable[[], int],
        app: Celery,
        pause: float,
    ) -> None:
        self._name = name
        self._agents = agents
        self._held = held
        self._app = app
        self._pause = pause

    async def watch(self, opened: OpenStore) -> None:
        """Report until cancelled; announce the agents again where a failover may have lost them."""
        announced = opened.connection.connects
        while True:
            with suppress(AgentException, RedisError):
                await self._report(opened)
                if announced != (connects := opened.connection.connects):
                    for agent in self._agents:
                        await opened.configs.restore(agent.config)
                    announced = connects
            await asyncio.sleep(self._pause)

    async def _report(self, opened: OpenStore) -> None:
        report = {
            "held": self._held(),
            "slots": opened.settings.slots,
            "agents": sorted(agent.name for agent in self._agents),
            # Celery may be told to serve other queues later.
            "queues": sorted(self._app.amqp.queues.consume_from),
            "tool_queues": sorted({queue for agent in self._agents for queue in agent.queues}),
            "seen": (await opened.connection.now()).timestamp(),
        }
        shown = orjson.dumps(report).decode()
        await opened.connection.execute("HSET", keys.WORKERS, self._name, shown)
