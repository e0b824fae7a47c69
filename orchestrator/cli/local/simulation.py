"""Starts the simulated provider that answers model calls by rules: no key, no network."""

import os
from dataclasses import dataclass

import orjson

from stepfleet.orchestrator.cli.local.process import Child
from stepfleet.orchestrator.cli.local.worker_command import leashed_argv
from stepfleet.orchestrator.cli.setup.data_folder import DataFolder
from stepfleet.orchestrator.errors import ConfigurationError

SERVER = "stepfleet.worker.testing"
_START_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Simulated:
    """What is simulated: the rules, how long answers take, and the share of calls that fail."""

    rules: str
    latency: str | None = None
    faults: float | None = None

    @property
    def arguments(self) -> list[str]:
        """The server's arguments."""
        given = ["--rules", self.rules]
        if self.latency is not None:
            given.append(f"--latency={self.latency}")
        if self.faults is not None:
            given.append(f"--faults={self.faults}")
        return given


def simulated_as(rules: str | None, latency: str | None, faults: float | None) -> Simulated | None:
    """Return what is to be simulated, if anything is.

    Raises `ConfigurationError` for latency or faults without rules. Pure.
    """
    if rules is not None:
        return Simulated(rules, latency, faults)
    for option, value in (("--simulate-latency", latency), ("--simulate-faults", faults)):
        if value is not None:
            raise ConfigurationError(f"{option} needs --simulate RULES: who answers the calls?")
    return None


async def start_simulation(simulated: Simulated, folder: DataFolder) -> tuple[Child, str]:
    """Start the server; return its process and its base URL.

    Raises `ConfigurationError` with what it said where it does not start.
    """
    log = folder.log("simulation")
    log.unlink(missing_ok=True)
    child = Child(
        "the simulated provider", leashed_argv(SERVER, *simulated.arguments), os.environ, log
    )
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
        msg = f"--simulate {simulated.rules}: the simulated provider did not start:\n{said}"
        raise ConfigurationError(msg) from None
