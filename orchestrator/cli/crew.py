"""The workers of one command, next to its own work, until that is done or interrupted.

A private Redis that dies meanwhile is started again. Other batches with open runs are paused, or
named: a command works on its own.
"""

import asyncio
import shlex
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from stepfleet.orchestrator.agents.agent import Agent
from stepfleet.orchestrator.cli.fleet import DataFolder, keep_private_server
from stepfleet.orchestrator.cli.notes import RunNotes
from stepfleet.orchestrator.cli.options import called_as, data_option
from stepfleet.orchestrator.cli.progress import Display
from stepfleet.orchestrator.cli.signals import Interrupts, until_interrupted
from stepfleet.orchestrator.cli.terminal import count, shown
from stepfleet.orchestrator.cli.workers import FleetPlan, Supervisor, simulated, supervisor_of
from stepfleet.orchestrator.client.audit import set_source
from stepfleet.orchestrator.client.fleet import AsyncFleet
from stepfleet.orchestrator.errors import ConfigurationError, StoreError
from stepfleet.orchestrator.records.batch import BatchProgress
from stepfleet.orchestrator.settings.settings import Settings

T = TypeVar("T")
_LOOKED_AT = 200
_NAMED = 3
"""Other batches that are looked at, and named."""
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
        set_source(called_as.get())
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

    async def settle_others(
        self, fleet: AsyncFleet, own: str, notes: RunNotes, again: Callable[[str], str]
    ) -> None:
        """Pause what nobody works on, and name every other batch with open runs, but the `own`.

        `again` returns the command that goes on with a batch without a note. In the data folder's
        private Redis, a batch that no command works on is paused before workers start: its command
        was killed. Where workers of others are alive, or on a shared Redis, nothing is paused.
        """
        found = [one for one in await fleet.batches.newest(_LOOKED_AT) if one.open]
        unwatched = [one for one in found if not notes.is_worked_on(one.batch_id)]
        others = [one for one in unwatched if one.batch_id != own]
        if not others:
            return
        alone = self.private and not any(one.alive for one in (await fleet.overview()).workers)
        if alone:
            for one in others:
                if one.paused < one.open or not one.sealed:
                    await (await fleet.batches.get(one.batch_id)).pause()
        self.display.notice(_heading(len(others), alone=alone))
        for one in others[:_NAMED]:
            note = notes.read(one.batch_id)
            self.display.notice(_named(one, note.command if note else again(one.batch_id)))
        if len(others) > _NAMED:
            more = f"{len(others) - _NAMED} more: stepfleet status{data_option()}"
            self.display.notice(f"  and {more}")


def _heading(number: int, *, alone: bool) -> str:
    what = "Another batch has" if number == 1 else f"{count(number)} other batches have"
    goes_on = "paused, this command does not run them" if alone else "workers may run them too"
    return f"{what} open runs ({goes_on}):"


def _named(one: BatchProgress, resume: str) -> str:
    name = f" {shown(one.name, 60)}" if one.name else ""
    lines = count(one.total - one.submitted)
    rest = "" if one.sealed else f"; {lines} lines are missing, which its first command submits"
    return (
        f"  {one.batch_id}{name}: {count(one.open)} of {count(one.total)} open{rest}\n"
        f"    resume: {resume}\n"
        f"    cancel: stepfleet cancel --batch {shlex.quote(one.batch_id)}{data_option()}"
    )
