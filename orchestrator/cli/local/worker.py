"""`stepfleet worker`: checks what it can, then becomes Celery's own worker command."""

import os
import sys
from dataclasses import replace
from pathlib import Path

from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.orchestrator.cli.local.worker_command import (
    WorkerOptions,
    worker_argv,
    worker_environment,
)
from stepfleet.orchestrator.cli.setup.open_files import raise_open_files_limit
from stepfleet.orchestrator.cli.setup.reaching import warn_of
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.settings.settings import load_settings
from stepfleet.orchestrator.store.embedded.folder import Folder
from stepfleet.orchestrator.store.embedded.server import ServerReply
from stepfleet.orchestrator.store.embedded.server import ask as ask_private


def become_worker(options: WorkerOptions, data: Path) -> None:
    """Replace this process by a worker. Raises `AgentException` with the fix before that."""
    load_agents(options.agents)
    url = _redis_url(data)
    warn_of(url, prefix=load_settings().prefix)
    raise_open_files_limit()
    # The process id stays: several workers of a machine have names of their own.
    argv = worker_argv(replace(options, name=options.name or f"worker-{os.getpid()}"))
    sys.stdout.flush()
    os.execve(argv[0], argv, worker_environment(options, url, os.environ))  # noqa: S606 - no shell


def _redis_url(data: Path) -> str:
    """Return the configured Redis, or the data folder's private one where it is running.

    A worker does not start a private one, which would outlive it.
    """
    settings = load_settings()
    if settings.redis_url is not None:
        return settings.store
    address = Folder(data.expanduser().absolute()).read_address()
    if address is None or ask_private(address) is not ServerReply.READY:
        msg = (
            "no Redis is named, and no fleet runs in this folder: set STEPFLEET_REDIS_URL, or "
            "start one with 'stepfleet up --agents ...'"
        )
        raise ConfigurationError(msg)
    return address.url
