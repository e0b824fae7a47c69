"""How a worker is started: its pool, its queues, its arguments and its environment. Pure."""

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from stepfleet.orchestrator.agents.agent import Agent
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.models.services import environment_of

WORKER = "stepfleet.worker"
WATCHDOG = "stepfleet.orchestrator.cli.local.watchdog"
POOLS = ("asyncio", "prefork", "threads", "solo")
THREADS = 32
MOST_SLOTS = 100_000


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """A worker's agents, its steps at once, and its queues.

    `slots` None leaves the number to the settings; `pool` is Celery's name or `asyncio`. Without
    `queues` the worker serves the settings' queue of steps only. `autoscale` is Celery's `MAX,MIN`.
    """

    agents: str
    slots: int | None = None
    pool: str = "asyncio"
    name: str | None = None
    log_level: str = "INFO"
    queues: tuple[str, ...] = ()
    autoscale: str | None = None


def celery_arguments(options: WorkerOptions) -> list[str]:
    """Return the arguments of Celery's worker command."""
    # Workers need not know each other: their common state is in the store.
    arguments = ["--loglevel", options.log_level, "--without-gossip", "--without-mingle"]
    if options.name:
        arguments += ["--hostname", options.name if "@" in options.name else f"{options.name}@%h"]
    if options.pool != "asyncio":
        arguments += ["--pool", options.pool]
    if options.queues:
        arguments += ["--queues", ",".join(options.queues)]
    if options.slots is not None:
        arguments += ["--concurrency", str(options.slots)]
    if options.autoscale is not None:
        arguments += ["--autoscale", options.autoscale]
    return arguments


def worker_argv(options: WorkerOptions) -> list[str]:
    """Return the command line of a worker without the watchdog."""
    return [sys.executable, "-m", WORKER, *celery_arguments(options)]


def watched_argv(module: str, *arguments: str) -> list[str]:
    """Return the command line of `python -m module` that ends when its parent dies."""
    return [sys.executable, "-m", WATCHDOG, module, *arguments]


def worker_environment(
    options: WorkerOptions, redis_url: str, environment: Mapping[str, str]
) -> dict[str, str]:
    """Return a worker's environment: the parent's, with the worker's Redis, agents and slots.

    The address is passed here and never as an argument: it may hold a password.
    """
    own = {"STEPFLEET_REDIS_URL": redis_url, "STEPFLEET_AGENTS": options.agents}
    if options.slots is not None:
        own["STEPFLEET_SLOTS"] = str(options.slots)
    return {**environment, **own}


def simulated_environment(base_url: str) -> dict[str, str]:
    """Return the variables that send model calls to a simulated provider, and nowhere else."""
    root = base_url.removesuffix("/v1")
    return {**environment_of(root), "STEPFLEET_ALLOW_MODEL_REQUESTS": "0"}


def slots_of(pool: str, wanted: int | None) -> int | None:
    """Return the slots of a worker with that pool; None leaves them to the settings.

    A thousand slots are cheap in one event loop only. Raises `ConfigurationError` for a pool
    that does not exist, or would lose or duplicate work.
    """
    if pool in ("gevent", "eventlet"):
        msg = (
            f"--pool {pool} is not supported: it never takes back the messages of a dead worker, "
            "and runs some twice; leave --pool out (1,000 steps at once in one process), or name "
            "prefork, threads or solo"
        )
        raise ConfigurationError(msg)
    if pool not in POOLS:
        raise ConfigurationError(f"--pool {pool} is unknown; name one of {', '.join(POOLS)}")
    if wanted is not None or pool == "asyncio":
        return wanted
    return {"prefork": os.cpu_count() or 1, "threads": THREADS, "solo": 1}[pool]


def checked_autoscale(given: str | None) -> str | None:
    """Return `MAX,MIN` as Celery takes it. Raises `ConfigurationError` for anything else."""
    if given is None:
        return None
    most, _, least = given.partition(",")
    if not most.strip().isdecimal() or not (least.strip() or "0").isdecimal():
        raise ConfigurationError("--autoscale takes MAX,MIN: the most and the least steps at once")
    if not 1 <= int(most) <= MOST_SLOTS or int(least.strip() or 0) > int(most):
        raise ConfigurationError(f"--autoscale {given}: MAX is 1 to {MOST_SLOTS:,}, MIN up to MAX")
    return f"{int(most)},{int(least.strip() or 0)}"


def tool_queues(agents: Iterable[Agent]) -> tuple[str, ...]:
    """Return the queues of the agents' tools, sorted."""
    return tuple(sorted({queue for agent in agents for queue in agent.queues}))


def named_queues(given: Iterable[str]) -> tuple[str, ...]:
    """Return the queues that `--queue` names: one each, or several with commas between.

    Raises `ConfigurationError` for an empty name.
    """
    names = [name.strip() for one in given for name in one.split(",")]
    if not all(names):
        raise ConfigurationError("--queue is empty: name a queue, as in --queue gpu")
    return tuple(dict.fromkeys(names))
