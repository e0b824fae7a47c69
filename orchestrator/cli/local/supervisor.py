"""Keeps workers running: starts them, restarts dead ones with a notice, and ends all of them."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stepfleet.orchestrator.cli.local.process import Child
from stepfleet.orchestrator.cli.terminal.exit_codes import USAGE
from stepfleet.orchestrator.errors import ConfigurationError

QUICK_SECONDS = 10.0
QUICK_DEATHS = 4
_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 30.0
_BEYOND_DRAIN = 10.0
_RELEASE_SECONDS = 5.0
_POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Restarts:
    """How often in a row a worker died soon after its start; decides on its next start. Pure."""

    quick_deaths: int = 0
    is_first: bool = True
    """Whether it has been started only once."""
    is_wrong: bool = False
    """Whether it said at its first start that settings or agents are wrong."""

    def after_death(self, lived_seconds: float, code: int = 0) -> "Restarts":
        """Return the count after one more death; a long life resets it."""
        if lived_seconds >= QUICK_SECONDS:
            return Restarts(is_first=False)
        wrong = self.is_first and code == USAGE
        return Restarts(self.quick_deaths + 1, is_first=False, is_wrong=wrong)

    @property
    def hopeless(self) -> bool:
        """Whether starting it again is no use."""
        return self.is_wrong or self.quick_deaths >= QUICK_DEATHS

    @property
    def pause(self) -> float:
        """Seconds to wait before the next start."""
        return min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0 ** max(0, self.quick_deaths - 1))


class Supervisor:
    """Several child processes that should all be running: `workers`, and others `beside` them.

    `drain` are the seconds that a stopping worker gives its steps; `stop` waits a little longer.
    """

    def __init__(
        self,
        workers: Sequence[Child],
        notice: Callable[[str], None],
        *,
        drain: float,
        beside: Sequence[Child] = (),
    ) -> None:
        self.workers = tuple(workers)
        self._children = (*workers, *beside)
        self._notice = notice
        self._bound = drain + _BEYOND_DRAIN

    async def start(self) -> None:
        """Start all of them."""
        for child in self._children:
            await child.start()

    async def watch(self) -> None:
        """Restart dead ones; ends only by raising `ConfigurationError` with the log's tail."""
        async with asyncio.TaskGroup() as group:
            for child in self._children:
                group.create_task(self._keep(child))
            await asyncio.Event().wait()

    async def stop(self) -> None:
        """End all of them cleanly, and by force those that take longer than the drain."""
        await asyncio.gather(*(child.stop(within=self._bound) for child in self._children))

    def kill(self) -> None:
        """End all of them at once: a few seconds to release their steps, and then by force.

        Signals are repeated: a worker may not have received the first one yet, and two signals
        that arrive together are one.
        """
        deadline = time.monotonic() + _RELEASE_SECONDS
        while time.monotonic() < deadline and any(child.runs for child in self._children):
            for child in self._children:
                child.terminate()
            time.sleep(_POLL_SECONDS)
        for child in self._children:
            child.kill()

    async def _keep(self, child: Child) -> None:
        restarts = Restarts()
        while True:
            started = time.monotonic()
            code = await child.ended()
            restarts = restarts.after_death(time.monotonic() - started, code)
            if restarts.hopeless:
                times = "" if restarts.quick_deaths == 1 else f" {restarts.quick_deaths} times"
                msg = (
                    f"{child.name} ended{times} right after its start "
                    f"({_how(code)}). Its log ({child.log}) ends with:\n{child.log_tail()}"
                )
                raise ConfigurationError(msg)
            self._notice(
                f"{child.name} {_how(code)}; restarting it in {restarts.pause:g} s. "
                f"Its unfinished steps are repeated. Log: {child.log}"
            )
            await asyncio.sleep(restarts.pause)
            await child.start()


def _how(code: int) -> str:
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
