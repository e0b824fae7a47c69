"""Waits until workers have told the fleet of their agents, as who submits by name must.

Celery says that a worker is ready before the worker has told of itself in Redis.
"""

import redis
from support.deadlines import wait_until

from stepfleet.orchestrator.store import keys


def until_known(redis_url: str, *names: str) -> None:
    """Return when runs can be submitted to agents of these names."""
    with redis.Redis.from_url(redis_url) as client:
        wait_until(
            lambda: all(client.hexists(keys.NAMES, name) for name in names),
            within=60,
            what=f"a worker that tells of {', '.join(names)}",
        )
