"""The workers of one command, beside its own work, until that is done or interrupted.

Does not know what is worked on. A private Redis that dies meanwhile is started again.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from stepfleet.orchestrator.agents.agent import Agent
from stepfleet.orchestrator.cli.local.fleet import FleetPlan, simulated, supervisor_of
from stepfleet.orchestrator.cli.local.supervisor import Supervisor
from stepfleet.orchestrator.cli.setup.data_folder import DataFolder, keep_private_server
from stepfleet.orchestrator.cli.terminal.progress import Display
from stepfleet.orchestrator.cli.terminal.signals import Interrupts, until_interrupted
from stepfleet.orchestrator.client.fleet import AsyncFleet
from stepfleet.orchestrator.errors import ConfigurationError, StoreError
from stepfleet.orchestrator.settings.settings import Settings

T = TypeVar("T")
_HALT_SECONDS = 15.0
"""How long a stop waits until every run of a batch knows of its pause, which is in force before."""
_PRIVATE_PATIENCE = 600.0
"""Seconds that a private server may load its data for after a restart."""


@dataclass
class Crew:
    """The workers and their Redis; `private` where that is the data folder's own server."""

    plan: FleetPlan
    agents: dict[str, Agent]
    folder: DataFolder
    settings: Settings
    private: bool
    display: Display = field(default_factory=Display)
    interrupts: Interrupts = field(default_factory=Interrupts)
    needed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by the work as soon as there are runs: without them no worker starts."""

    @property
    def agent_names(self) -> list[str]:
        """The agents of the command's own workers."""
        return sorted(self.agents) if self.plan.workers else []

    async def beside(
        self,
        work: Callable[[AsyncFleet], Coroutine[Any, Any, T]],
        halt: Callable[[AsyncFleet], Awaitable[object]],
    ) -> T | None:
        """Return what `work` returns; None after an interrupt.

        Work that ends early is halted: by `halt`, before its workers have stopped.
        """
        with self.interrupts.handled():
            async with (
                simulated(self.plan, self.folder) as extra,
                AsyncFleet(settings=self._patient(), brings=self.agent_names) as fleet,
            ):
                workers = supervisor_of(
                    self.plan, self.settings, self.folder, extra, self.display.notice
                )
                self.interrupts.before_exit(self.display.leave)
                self.interrupts.before_exit(workers.kill)
                return await self._work(fleet, workers, work, halt)

    async def _work(
        self,
        fleet: AsyncFleet,
        workers: Supervisor,
        work: Callable[[AsyncFleet], Coroutine[Any, Any, T]],
        halt: Callable[[AsyncFleet], Awaitable[object]],
    ) -> T | None:
        ended = lost = False
        try:
            found = await until_interrupted(work(fleet), self.interrupts, self._keep(workers))
            ended = not self.interrupts.requested.is_set()
        except StoreError:
            lost = True
            raise
        else:
            return found
        finally:
            if self.interrupts.requested.is_set():
                self.display.notice(
                    f"Stopping: steps in progress may finish (up to {self.settings.drain:g} "
                    "s). Ctrl-C again ends at once."
                )
            halted = self._halt(fleet, halt) if not (ended or lost) else asyncio.sleep(0)
            await asyncio.gather(halted, workers.stop())

    async def _halt(
        self, fleet: AsyncFleet, halt: Callable[[AsyncFleet], Awaitable[object]]
    ) -> None:
        try:
            async with asyncio.timeout(_HALT_SECONDS):
                await halt(fleet)
        except TimeoutError:
            return  # in force; workers bring it to the other runs
        except (ConfigurationError, StoreError) as error:
            self.display.notice(f"The batch could not be paused: {error}")

    async def _keep(self, workers: Supervisor) -> None:
        """Keep the private server, and the workers as soon as they are needed."""
        async with asyncio.TaskGroup() as group:
            if self.private:
                notice = self.display.notice
                group.create_task(keep_private_server(self.folder.root, self.settings, notice))
            await self.needed.wait()
            await workers.start()
            await workers.watch()

    def _patient(self) -> Settings:
        if not self.private:
            return self.settings
        patience = max(self.settings.patience, _PRIVATE_PATIENCE)
        return self.settings.model_copy(update={"patience": patience})
