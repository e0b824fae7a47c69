"""Starts the simulated provider that answers model calls by rules: no key, no network."""

import contextlib
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass

import orjson

from stepfleet.orchestrator.cli.local.process import Child
from stepfleet.orchestrator.cli.local.worker_command import simulated_environment, watched_argv
from stepfleet.orchestrator.cli.setup.data_folder import DataFolder
from stepfleet.orchestrator.errors import ConfigurationError

SERVER = "stepfleet.worker.testing"
_START_SECONDS = 20.0
_STOP_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Simulated:
    """The rules of a simulated provider, the latency of its answers, and its share of faults."""

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

    @property
    def options(self) -> list[str]:
        """The options of a command that ask for it."""
        words = ["--simulate", self.rules]
        if self.latency is not None:
            words += ["--simulate-latency", self.latency]
        if self.faults is not None:
            words += ["--simulate-faults", f"{self.faults:g}"]
        return words


def simulated_as(rules: str | None, latency: str | None, faults: float | None) -> Simulated | None:
    """Return the provider to simulate, if any.

    Raises `ConfigurationError` for latency or faults without rules. Pure.
    """
    if rules is not None:
        return Simulated(rules, latency, faults)
    for option, value in (("--simulate-latency", latency), ("--simulate-faults", faults)):
        if value is not None:
            raise ConfigurationError(f"{option} needs --simulate RULES, which answer the calls")
    return None


@contextlib.asynccontextmanager
async def simulation(
    simulated: Simulated, folder: DataFolder
) -> AsyncIterator[tuple[Child, dict[str, str]]]:
    """Run the server; give its process, and the environment of the workers that use it.

    Raises `ConfigurationError` with the server's output where it does not start.
    """
    log = folder.log("simulation")
    log.unlink(missing_ok=True)
    argv = watched_argv(SERVER, *simulated.arguments)
    child = Child("the simulated provider", argv, os.environ, log)
    await child.start(answers=True)
    try:
        line = ""
        with contextlib.suppress(TimeoutError):
            line = await child.first_line(within=_START_SECONDS)
        try:
            base_url = str(orjson.loads(line)["url"])
        except (orjson.JSONDecodeError, KeyError, TypeError):
            output = "\n".join(part for part in (line, child.log_tail()) if part)
            msg = f"--simulate {simulated.rules}: the simulated provider did not start:\n{output}"
            raise ConfigurationError(msg) from None
        yield child, simulated_environment(base_url)
    finally:
        await child.stop(within=_STOP_SECONDS)
