"""Starts the simulated provider that answers model calls by rules: no key, no network."""

import os

import orjson

from stepfleet.orchestrator.cli.child import Child
from stepfleet.orchestrator.cli.places import DataFolder
from stepfleet.orchestrator.cli.worker_command import leashed_argv
from stepfleet.orchestrator.errors import ConfigurationError

SERVER = "stepfleet.worker.testing"
_START_SECONDS = 20.0


async def start_simulation(rules: str, folder: DataFolder) -> tuple[Child, str]:
    """Start the server; return its process and its base URL.

    Raises `ConfigurationError` with what it said where it does not start.
    """
    log = folder.log("simulation")
    log.unlink(missing_ok=True)
    child = Child("the simulated provider", leashed_argv(SERVER, "--rules", rules), os.environ, log)
    await child.start(answers=True)
    try:
        line = await child.first_line(within=_START_SECONDS)
    except TimeoutError:
        line = ""
    try:
        return child, str(orjson.loads(line)["url"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        await child.stop(within=2.0)
        said = "\n".join(part for part in (line, child.log_tail()) if part)
        msg = f"--simulate {rules}: the simulated provider did not start:\n{said}"
        raise ConfigurationError(msg) from None
