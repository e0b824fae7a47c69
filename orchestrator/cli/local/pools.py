"""Which of Celery's pools a worker may have, and how many slots each has by itself. Pure."""

import os

from stepfleet.orchestrator.errors import ConfigurationError

POOLS = ("asyncio", "prefork", "threads", "solo")
THREADS = 32


def slots_of(pool: str, asked: int | None) -> int | None:
    """Return the slots of a worker with that pool; None leaves them to the settings.

    A thousand slots are cheap in one event loop only. Raises `ConfigurationError` for a pool
    that does not exist, or would lose or duplicate work.
    """
    if pool in ("gevent", "eventlet"):
        msg = (
            f"--pool {pool} is not supported: it never takes back the messages of a worker that "
            "died, and runs some twice; leave --pool out (1,000 steps at once in one process), "
            "or name prefork, threads or solo"
        )
        raise ConfigurationError(msg)
    if pool not in POOLS:
        raise ConfigurationError(f"--pool {pool} is not known; name one of {', '.join(POOLS)}")
    if asked is not None or pool == "asyncio":
        return asked
    return {"prefork": os.cpu_count() or 1, "threads": THREADS, "solo": 1}[pool]
