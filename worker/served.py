"""What a worker says of queues: which it serves, and which its agents' tools need."""

from collections.abc import Iterable
from typing import Any

from celery import Celery

from stepfleet.orchestrator.agent import Agent


def queues_told(app: Celery | None, agents: Iterable[Agent]) -> dict[str, Any]:
    """Return that as a part of its report; without an app it serves none.

    Celery may be told to serve others later.
    """
    return {
        "queues": sorted(app.amqp.queues.consume_from) if app else [],
        "tool_queues": sorted({queue for agent in agents for queue in agent.queues}),
    }
