"""How a worker is started: its arguments and its environment. Pure."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass

from stepfleet.orchestrator.cli.options import DEFAULT_FLOWER_PORT, FLOWER_PORT

WORKER = "stepfleet.worker"
LEASH = "stepfleet.orchestrator.cli.local.leash"


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """What a worker is told: where its agents are, and how much it does at once.

    `slots` None leaves the number to the settings; `pool` is Celery's name or `asyncio`. Without
    `queues` the worker does steps alone, of the settings' queue.
    """

    agents: str
    slots: int | None = None
    pool: str = "asyncio"
    name: str | None = None
    log_level: str = "INFO"
    queues: tuple[str, ...] = ()


def celery_arguments(options: WorkerOptions) -> list[str]:
    """Return the arguments of Celery's worker command."""
    arguments = ["--loglevel", options.log_level]
    # Workers need not know of each other: what they share is in the store.
    arguments += ["--without-gossip", "--without-mingle"]
    if options.name:
        arguments += ["--hostname", f"{options.name}@%h"]
    if options.pool != "asyncio":
        arguments += ["--pool", options.pool]
    if options.queues:
        arguments += ["--queues", ",".join(options.queues)]
    if options.slots is not None:
        arguments += ["--concurrency", str(options.slots)]
    return arguments


def worker_argv(options: WorkerOptions) -> list[str]:
    """Return the command line of a worker that stands alone."""
    return [sys.executable, "-m", WORKER, *celery_arguments(options)]


def leashed_argv(module: str, *arguments: str) -> list[str]:
    """Return the command line of `python -m module` that ends when its starter dies."""
    return [sys.executable, "-m", LEASH, module, *arguments]


def worker_environment(
    options: WorkerOptions, redis_url: str, environment: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment of a worker: the starter's own, and what the worker must know.

    The address travels here and never as an argument: it may hold a password.
    """
    own = {"STEPFLEET_REDIS_URL": redis_url, "STEPFLEET_AGENTS": options.agents}
    if options.slots is not None:
        own["STEPFLEET_SLOTS"] = str(options.slots)
    return {**environment, **own}


def flower_port(environment: Mapping[str, str]) -> int:
    """Return the port on which Flower listens when none is asked for."""
    given = environment.get(FLOWER_PORT, "")
    return int(given) if given.isdigit() else DEFAULT_FLOWER_PORT


def simulated_environment(base_url: str) -> dict[str, str]:
    """Return what sends model calls to a simulated provider, and to nobody else."""
    return {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": "simulated",
        "STEPFLEET_ALLOW_MODEL_REQUESTS": "0",
    }
