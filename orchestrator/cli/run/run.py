"""`stepfleet run`: one command from a file of inputs to a file of results.

Checks everything before it submits anything. After an interrupt, the same command resumes.
"""

import asyncio
import contextlib
import hashlib
import os
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import orjson

from stepfleet.orchestrator.agents.agent import Agent
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.orchestrator.batches.source import open_input
from stepfleet.orchestrator.cli.local.fleet import FleetPlan, simulated, supervisor_of
from stepfleet.orchestrator.cli.local.supervisor import Supervisor
from stepfleet.orchestrator.cli.results.input_file import (
    configs_used,
    default_agent,
    digest_of,
    named_file,
)
from stepfleet.orchestrator.cli.results.result_file import check_writable, is_empty
from stepfleet.orchestrator.cli.run.batches import follow, print_skipped
from stepfleet.orchestrator.cli.setup.data_folder import DataFolder, local_redis
from stepfleet.orchestrator.cli.setup.preflight import check_models
from stepfleet.orchestrator.cli.setup.redis_facts import warn_of
from stepfleet.orchestrator.cli.terminal.exit_codes import INTERRUPTED, code_of
from stepfleet.orchestrator.cli.terminal.output import notice, print_either
from stepfleet.orchestrator.cli.terminal.progress import Display
from stepfleet.orchestrator.cli.terminal.signals import Interrupts, until_interrupted
from stepfleet.orchestrator.cli.views.batches import summary
from stepfleet.orchestrator.client.fleet import AsyncBatch, AsyncFleet
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.records.batch import BatchProgress
from stepfleet.orchestrator.settings.settings import Settings


@dataclass(frozen=True, slots=True)
class Note:
    """A command's batch; `batch_id` is empty until it is submitted."""

    key: str
    batch_id: str = ""


def identity(
    source: bytes, agent: str | None, agents: Mapping[str, Agent], out: Path | None
) -> str:
    """Return the identity of a `run` command: a digest of file content, agents, results file."""
    digest = hashlib.sha256(source)
    for part in (agent or "", str(out.absolute()) if out else ""):
        digest.update(b"\0" + part.encode())
    for name in sorted(agents):
        digest.update(b"\0" + agents[name].config.digest.encode())
    return digest.hexdigest()[:32]


class Notes:
    """The notes of one data folder."""

    def __init__(self, folder: Path, identity: str) -> None:
        self._path = folder / f"{identity}.json"
        self._identity = identity

    def read(self) -> Note | None:
        """Return the note of the last such command, if any."""
        try:
            return Note(**orjson.loads(self._path.read_bytes()))
        except (OSError, orjson.JSONDecodeError, TypeError):
            return None

    def begin(self) -> Note:
        """Note a new batch before its submission, so that a partial submission is found again."""
        note = Note(key=f"run-{self._identity}-{uuid.uuid4().hex[:8]}")
        self._write(note)
        return note

    def submitted(self, note: Note, batch_id: str) -> None:
        """Note the batch's id."""
        self._write(replace(note, batch_id=batch_id))

    def _write(self, note: Note) -> None:
        fresh = self._path.with_name(f"{self._path.name}.{os.getpid()}.new")
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
            file.write(orjson.dumps(asdict(note)))
        fresh.replace(self._path)


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The arguments of `run`."""

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

    Raises `AgentException` with the fix for every user's error.
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
        with local_redis(folder.root) as settings:
            warn_of(settings.store, patience=settings.patience, prefix=settings.prefix)
            run = _Run(replace(plan, file=file, agent=default), agents, folder, notes, settings)
            return asyncio.run(run.to_its_end())


@dataclass
class _Run:
    """One `run` command and its batch."""

    plan: RunPlan
    agents: dict[str, Agent]
    folder: DataFolder
    notes: Notes
    settings: Settings
    interrupts: Interrupts = field(default_factory=Interrupts)
    workers_needed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def _agent_names(self) -> list[str]:
        """The agents of the command's own workers."""
        return sorted(self.agents) if self.plan.fleet.workers else []

    async def to_its_end(self) -> int:
        """Submit or resume the batch, run it, and print its outcome; return the exit code."""
        started = time.monotonic()
        with self.interrupts.handled():
            async with (
                simulated(self.plan.fleet, self.folder) as extra,
                AsyncFleet(settings=self.settings, brings=self._agent_names) as fleet,
            ):
                progress = await self._work(fleet, extra)
        if progress is None:
            notice("Interrupted. The same command resumes the batch.")
            return INTERRUPTED
        seconds = time.monotonic() - started
        print_either(progress, lambda ended: summary(ended, seconds), json=self.plan.json)
        self._print_next_commands(progress)
        return code_of(completed=progress.completed, total=progress.total)

    async def _work(self, fleet: AsyncFleet, extra: dict[str, str]) -> BatchProgress | None:
        """Submit and collect results while the workers run; None after an interrupt."""
        display = Display()
        self.interrupts.before_exit(display.leave)
        plan = self.plan.fleet
        workers = supervisor_of(plan, self.settings, self.folder, extra, display.notice)
        self.interrupts.before_exit(workers.kill)
        try:
            return await until_interrupted(
                self._submit_and_collect(fleet, display),
                self.interrupts,
                self._keep_working(workers),
            )
        finally:
            if self.interrupts.requested.is_set():
                display.notice(
                    f"Stopping: steps in progress may finish (up to {self.settings.drain:g} "
                    "s). Ctrl-C again ends at once."
                )
            await workers.stop()

    async def _keep_working(self, workers: Supervisor) -> None:
        """Run the workers as soon as there are runs: a refused file needs none."""
        await self.workers_needed.wait()
        await workers.start()
        await workers.watch()

    async def _submit_and_collect(self, fleet: AsyncFleet, display: Display) -> BatchProgress:
        batch = await self._batch(fleet)
        if (await batch.progress()).open:
            self.workers_needed.set()
        with display:
            return await follow(batch, self.plan.out, self.plan.output_format, display)

    async def _batch(self, fleet: AsyncFleet) -> AsyncBatch:
        """Return the batch of an earlier, interrupted command, or a new one."""
        note = self.notes.read()
        known = None
        if note is not None and note.batch_id:
            with contextlib.suppress(ConfigurationError):  # another store, or past its retention
                known = await fleet.batches.get(note.batch_id)
        progress = await known.progress() if known else None
        if note is None or not self._is_resumable(note, progress):
            note = self._new_note()
        elif known and progress and progress.sealed:
            notice(f"Resuming batch {known.id}: {progress.done} of {progress.total} ended")
            return known
        await self._warn_of_other_workers(fleet)
        batch = await fleet.submit_batch(
            self.plan.file,
            self.plan.agent,
            agents=self.agents,
            idempotency_key=note.key,
            skip_invalid=self.plan.skip_invalid,
            name=self.plan.file.name,
            on_progress=lambda _: self.workers_needed.set(),
        )
        self.notes.submitted(note, batch.id)
        print_skipped(batch)
        return batch

    async def _warn_of_other_workers(self, fleet: AsyncFleet) -> None:
        """Warn of other workers on this Redis that do not have the agents."""
        others = [worker for worker in (await fleet.overview()).workers if worker.alive]
        lacking = sorted(
            {name for name in self._agent_names for worker in others if name not in worker.agents}
        )
        if lacking:
            notice(
                f"WARNING: other workers on this Redis have no agent {lacking[0]!r}: steps that "
                "they take are put back and count as failed attempts (model_attempts). Fix: unset "
                "STEPFLEET_REDIS_URL for a private Redis, or start those workers with this agent"
            )

    def _is_resumable(self, note: Note, progress: BatchProgress | None) -> bool:
        """Return whether the batch has open runs, or results that were collected in part."""
        if progress is None:
            return not note.batch_id  # interrupted during its submission
        if progress.open or not progress.sealed:
            return True
        return self.plan.out is not None and not is_empty(self.plan.out)

    def _new_note(self) -> Note:
        out = self.plan.out
        if out is not None and not is_empty(out):
            msg = (
                f"--out {out}: its results are not of this batch (file, agents or store have "
                "changed); name another file, or remove this one"
            )
            raise ConfigurationError(msg)
        return self.notes.begin()

    def _print_next_commands(self, progress: BatchProgress) -> None:
        if self.plan.out:
            notice(f"Results: {self.plan.out}")
        if progress.completed < progress.total:
            notice(
                f"Why: stepfleet results {progress.batch_id} --failed, stepfleet explain RUN. "
                f"Again: stepfleet retry --batch {progress.batch_id} --failed"
            )
