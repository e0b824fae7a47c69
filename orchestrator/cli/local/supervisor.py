"""Keeps workers running: starts them, says when one dies, starts it anew, and ends all of them."""

import asyncio
import time
from collections.abc import Callable, Sequence

from stepfleet.orchestrator.cli.local.process import Child
from stepfleet.orchestrator.cli.local.restarts import Restarts
from stepfleet.orchestrator.errors import ConfigurationError

_BEYOND_DRAIN = 10.0
_MOMENT = 5.0
_LOOK = 0.05


class Supervisor:
    """Several child processes that should all be running.

    `drain`: seconds that a stopping worker gives its steps; ours to wait a little longer.
    """

    def __init__(
        self, children: Sequence[Child], say: Callable[[str], None], *, drain: float
    ) -> None:
        self._children = children
        self._say = say
        self._bound = drain + _BEYOND_DRAIN

    async def start(self) -> None:
        """Start all of them."""
        for child in self._children:
            await child.start()

    async def watch(self) -> None:
        """Start anew what dies; ends only by raising `ConfigurationError` with the log's tail."""
        async with asyncio.TaskGroup() as group:
            for child in self._children:
                group.create_task(self._keep(child))
            await asyncio.Event().wait()

    async def stop(self) -> None:
        """End all of them cleanly, and by force what takes longer than draining may."""
        await asyncio.gather(*(child.stop(within=self._bound) for child in self._children))

    def kill(self) -> None:
        """End all of them at once: a moment to hand back what they do, and then by force.

        Asked again and again: whether they have heard the request to drain is not known here, and
        two signals that arrive together are one.
        """
        deadline = time.monotonic() + _MOMENT
        while time.monotonic() < deadline and any(child.runs for child in self._children):
            for child in self._children:
                child.ask_to_end()
            time.sleep(_LOOK)
        for child in self._children:
            child.kill()

    async def _keep(self, child: Child) -> None:
        restarts = Restarts()
        while True:
            started = time.monotonic()
            code = await child.ended()
            restarts = restarts.after_death(time.monotonic() - started)
            if restarts.hopeless:
                msg = (
                    f"{child.name} ended {restarts.quick_deaths} times right after its start "
                    f"({_how(code)}). Its log ({child.log}) says:\n{child.log_tail()}"
                )
                raise ConfigurationError(msg)
            self._say(
                f"{child.name} {_how(code)}; starting it anew in {restarts.pause:g} s. "
                f"What it was doing is done again. Log: {child.log}"
            )
            await asyncio.sleep(restarts.pause)
            await child.start()


def _how(code: int) -> str:
    return f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
