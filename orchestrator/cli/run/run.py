"""`stepfleet run`: one command from a file of inputs to a file of results.

Everything is checked before anything is submitted; interrupted, the same command goes on.
"""

import asyncio
import contextlib
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

from stepfleet.orchestrator.agents.agent import Agent
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.orchestrator.batches.source import open_input
from stepfleet.orchestrator.cli.local.fleet import FleetPlan, simulated, supervisor_of
from stepfleet.orchestrator.cli.local.supervisor import Supervisor
from stepfleet.orchestrator.cli.results.follow import follow, say_skipped
from stepfleet.orchestrator.cli.results.input_file import (
    configs_used,
    default_agent,
    digest_of,
    kind_of,
    named_file,
)
from stepfleet.orchestrator.cli.results.result_file import (
    Nowhere,
    ResultFile,
    check_writable,
    is_empty,
)
from stepfleet.orchestrator.cli.run.resume_notes import Note, Notes, identity
from stepfleet.orchestrator.cli.setup.data_folder import DataFolder, local_redis
from stepfleet.orchestrator.cli.setup.preflight import check_models
from stepfleet.orchestrator.cli.setup.redis_facts import warn_of
from stepfleet.orchestrator.cli.terminal import tables
from stepfleet.orchestrator.cli.terminal.exit_codes import INTERRUPTED, code_of
from stepfleet.orchestrator.cli.terminal.output import notice, print_json, screen
from stepfleet.orchestrator.cli.terminal.progress import Display
from stepfleet.orchestrator.cli.terminal.signals import Interrupts, until_asked
from stepfleet.orchestrator.client.fleet import AsyncBatch, AsyncFleet
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.records.batch import BatchProgress
from stepfleet.orchestrator.settings.settings import Settings


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What the user asked `run` for."""

    file: Path
    agent: str | None
    fleet: FleetPlan
    out: Path | None
    data: Path
    skip_invalid: bool
    output_format: str
    json: bool


def run_file(plan: RunPlan) -> int:
    """Run the file's batch to its end; return the exit code.

    Raises `AgentException` with the fix for whatever the user can put right.
    """
    agents = load_agents(plan.fleet.agents)
    default = default_agent(agents, plan.agent)
    with named_file(plan.file) as file:
        with open_input(file) as source:
            content = digest_of(source)
            used = configs_used((line.data for line in source), agents, default)
        if plan.out is not None:
            check_writable(plan.out)
        if plan.fleet.simulate is None:
            check_models(used, os.environ)
        folder = DataFolder.prepare(plan.data)
        notes = Notes(folder.notes, identity(content, default, agents, plan.out))
        with local_redis(folder) as settings:
            warn_of(settings.store, patience=settings.patience)
            run = _Run(replace(plan, file=file, agent=default), agents, folder, notes, settings)
            return asyncio.run(run.to_its_end())


class _Run:
    """One `run` command, with all that it was asked for and has found."""

    def __init__(
        self,
        plan: RunPlan,
        agents: dict[str, Agent],
        folder: DataFolder,
        notes: Notes,
        settings: Settings,
    ) -> None:
        self._plan = plan
        self._agents = agents
        self._folder = folder
        self._notes = notes
        self._settings = settings
        self._interrupts = Interrupts()
        self._wanted = asyncio.Event()
        self._brings = sorted(agents) if plan.fleet.workers else []

    async def to_its_end(self) -> int:
        """Submit or find the batch, work on it, and say what became of it."""
        started = time.monotonic()
        with self._interrupts.heard():
            async with (
                simulated(self._plan.fleet, self._folder) as extra,
                AsyncFleet(settings=self._settings, brings=self._brings) as fleet,
            ):
                progress = await self._work(fleet, extra)
        if progress is None:
            notice("Interrupted. The same command goes on where this one stopped.")
            return INTERRUPTED
        if self._plan.json:
            print_json(progress.to_dict())
        else:
            screen().print(tables.summary(progress, time.monotonic() - started))
        self._say_what_next(progress)
        return code_of(completed=progress.completed, total=progress.total)

    async def _work(self, fleet: AsyncFleet, extra: dict[str, str]) -> BatchProgress | None:
        """Submit, and collect the results, while workers do what is there; None: interrupted."""
        display = Display()
        self._interrupts.before_leaving_at_once(display.leave)
        plan = self._plan.fleet
        workers = supervisor_of(plan, self._settings, self._folder, extra, display.say)
        self._interrupts.before_leaving_at_once(workers.kill)
        try:
            return await until_asked(
                self._submit_and_collect(fleet, display),
                self._interrupts.asked,
                self._keep_working(workers),
            )
        finally:
            if self._interrupts.asked.is_set():
                display.say(
                    f"Stopping: steps under way may end (up to {self._settings.drain:g} "
                    "s). Ctrl-C again ends at once."
                )
            await workers.stop()

    async def _keep_working(self, workers: Supervisor) -> None:
        """Run the workers from when the first runs are there: a refused file needs none."""
        await self._wanted.wait()
        await workers.start()
        await workers.watch()

    async def _submit_and_collect(self, fleet: AsyncFleet, display: Display) -> BatchProgress:
        batch = await self._batch(fleet)
        progress = await batch.progress()
        if progress.open:
            self._wanted.set()
        kind = kind_of(self._plan.output_format, progress.format)
        with contextlib.ExitStack() as stack:
            sink = stack.enter_context(ResultFile(self._plan.out, kind)) if self._plan.out else None
            stack.enter_context(display)
            return await follow(batch, sink or Nowhere(), display)

    async def _batch(self, fleet: AsyncFleet) -> AsyncBatch:
        """Return the batch that the same command began before, or a new one."""
        note = self._notes.read()
        known = await self._known(fleet, note)
        if note is None or not await self._is_resumable(note, known):
            note, known = self._fresh(), None
        if known is not None:
            progress = await known.progress()
            if progress.sealed:
                notice(f"Going on with batch {known.id}: {progress.done} of {progress.total} ended")
                return known
        await self._warn_of_strangers(fleet)
        batch = await fleet.submit_batch(
            self._plan.file,
            self._plan.agent,
            agents=self._agents,
            idempotency_key=note.key,
            skip_invalid=self._plan.skip_invalid,
            name=self._plan.file.name,
            on_progress=lambda _: self._wanted.set(),
        )
        self._notes.submitted(note, batch.id)
        say_skipped(batch)
        return batch

    async def _warn_of_strangers(self, fleet: AsyncFleet) -> None:
        """Say when workers of others share the store and could not do these runs."""
        there = [worker for worker in (await fleet.overview()).workers if worker.alive]
        lacking = sorted(
            {name for name in self._brings for worker in there if name not in worker.agents}
        )
        if lacking:
            notice(
                f"WARNING: workers that run on this Redis already have no agent {lacking[0]!r}: "
                "steps that they take are put back and count as failed attempts (model_attempts). "
                "Fix: unset STEPFLEET_REDIS_URL for a private Redis, or start them with this agent"
            )

    async def _known(self, fleet: AsyncFleet, note: Note | None) -> AsyncBatch | None:
        if note is None or not note.batch_id:
            return None
        with contextlib.suppress(ConfigurationError):  # another store, or past its retention
            return await fleet.batches.get(note.batch_id)
        return None

    async def _is_resumable(self, note: Note, known: AsyncBatch | None) -> bool:
        """Tell whether there is something to go on with: open runs, or results half collected."""
        if known is None:
            return not note.batch_id  # it was interrupted while it submitted
        progress = await known.progress()
        if progress.open or not progress.sealed:
            return True
        return self._plan.out is not None and not is_empty(self._plan.out)

    def _fresh(self) -> Note:
        out = self._plan.out
        if out is not None and not is_empty(out):
            msg = (
                f"--out {out}: there are results in it that are not of this batch (file, agents "
                "or store have changed); name another file, or remove this one"
            )
            raise ConfigurationError(msg)
        return self._notes.begin()

    def _say_what_next(self, progress: BatchProgress) -> None:
        if self._plan.out:
            notice(f"Results: {self._plan.out}")
        if progress.completed < progress.total:
            notice(
                f"Why: stepfleet results {progress.batch_id} --failed, stepfleet explain RUN. "
                f"Again: stepfleet retry --batch {progress.batch_id} --failed"
            )
