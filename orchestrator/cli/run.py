"""`stepfleet run`: one command from a file of inputs to a file of results.

Checks everything before it submits anything. One file is one batch: the same command resumes it
after an interrupt, and completes its results when it is done. Only `--again` begins another one.
"""

import asyncio
import contextlib
import hashlib
import os
import shlex
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from stepfleet.orchestrator.agents.agent import Agent
from stepfleet.orchestrator.agents.config import AgentConfig
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.orchestrator.batches.files.source import open_input
from stepfleet.orchestrator.cli import options
from stepfleet.orchestrator.cli.ask import Question, ask_agent, print_answer, text_of
from stepfleet.orchestrator.cli.batches import raises
from stepfleet.orchestrator.cli.crew import Crew
from stepfleet.orchestrator.cli.fleet import DataFolder, local_redis, warn_of
from stepfleet.orchestrator.cli.inputs import (
    FileOptions,
    configs_used,
    default_agent,
    digest_of,
    named_file,
    overrides_of,
)
from stepfleet.orchestrator.cli.model_check import check_calls, check_models
from stepfleet.orchestrator.cli.notes import Note, RunNotes, identity, new_key, only_writer
from stepfleet.orchestrator.cli.options import COMPLETED, INTERRUPTED, SOME_FAILED, data_option
from stepfleet.orchestrator.cli.result_file import check_apart, check_writable, is_empty
from stepfleet.orchestrator.cli.results import ResultOptions
from stepfleet.orchestrator.cli.submit import EndedBatch, follow, print_ended, print_skipped
from stepfleet.orchestrator.cli.terminal import notice
from stepfleet.orchestrator.cli.workers import FleetPlan, Simulated
from stepfleet.orchestrator.client.fleet import AsyncBatch, AsyncFleet
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.records.batch import BatchProgress
from stepfleet.orchestrator.records.run.results import AgentRunResult
from stepfleet.orchestrator.settings.settings import load_settings


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """The arguments of `run`."""

    file: Annotated[Path | None, typer.Argument(metavar="[FILE]", help=options.INPUTS)] = None
    agents: options.AgentsRef
    agent: options.AgentName = None
    results: ResultOptions
    workers: Annotated[
        int,
        typer.Option(
            "--workers", "-w", min=0, max=256, help="Worker processes; 0 if others do the work."
        ),
    ] = 1
    slots: options.Slots = None
    simulated: Simulated
    data: options.Data = options.DATA_FOLDER
    lines: FileOptions
    json: options.Json = False
    again: options.Again = False
    no_check: options.NoCheck = False
    retry_failed: Annotated[
        bool,
        typer.Option("--retry-failed", help="Retry the batch's runs that did not complete."),
    ] = False
    raised: options.Raised = None
    batch: Annotated[
        str | None,
        typer.Option("--batch", "-b", metavar="ID", help="Resume this batch; no FILE."),
    ] = None

    @property
    def fleet(self) -> FleetPlan:
        """The fleet that works on the file. Raises `ConfigurationError`."""
        return FleetPlan(self.agents, self.workers, self.slots, self.simulated.wanted())

    @property
    def from_stdin(self) -> bool:
        """Whether the inputs come from standard input."""
        return str(self.file) == "-"

    @property
    def out(self) -> Path | None:
        """The results file."""
        return self.results.out


def check_options(plan: RunPlan) -> None:
    """Raise `ConfigurationError` for options that contradict each other. Pure."""
    plan.results.check()
    if (plan.file is None) == (plan.batch is None):
        raise ConfigurationError("name a FILE of inputs, or --batch ID to resume a batch")
    if plan.lines.only_new and (plan.again or plan.batch or plan.from_stdin):
        msg = "--only-new adds to the batch of a FILE; leave --again, --batch and '-' out"
        raise ConfigurationError(msg)
    if plan.again and (plan.retry_failed or plan.batch):
        other = "--retry-failed" if plan.retry_failed else "--batch"
        msg = f"--again begins a new batch, {other} resumes one; leave one of them out"
        raise ConfigurationError(msg)
    if plan.raised and not plan.retry_failed:
        raise ConfigurationError("--raise needs --retry-failed: it changes the limits of retries")


def of_file(plan: RunPlan) -> str:
    """Return the name of the note of the file's newest batch; empty for standard input."""
    if plan.file is None or plan.from_stdin:
        return ""
    parts = (str(plan.file.resolve()), plan.agent, plan.simulated.rules)
    return f"file-{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}"


def is_run_by(batch_id: str) -> tuple[str, str]:
    """Return what another command does that works on the same batch, and the fix."""
    if not batch_id:
        return "is about to run the same file", "Wait a moment and repeat the command"
    data = data_option()
    fix = (
        f"Watch it: stepfleet watch {batch_id}{data}. Its results, also before it has ended: "
        f"stepfleet results {batch_id} --out FILE{data}. A second batch, paid again: --again"
    )
    return f"already runs batch {batch_id} of this file", fix


def with_out(plan: RunPlan, note: Note | None) -> RunPlan:
    """Return the plan with the results file of its earlier command, where it names none.

    The file keeps its form where the plan names none. Raises `ConfigurationError` for another
    file than that.
    """
    if note is None or not note.out or plan.again:
        return plan
    if plan.out is None or plan.out.absolute() == Path(note.out):
        check_writable(Path(note.out))
        form = plan.results.form or note.results
        return replace(plan, results=ResultOptions(plan.out or Path(note.out), **form))
    if plan.batch:
        return plan
    msg = (
        f"batch {note.batch_id} runs this file, with --out {note.out}: leave --out out to resume "
        f"it. Its results in another file: stepfleet results {note.batch_id} --out "
        f"{shlex.quote(str(plan.out))}{data_option()}. A second batch, paid again: --again"
    )
    raise ConfigurationError(msg)


def command_of(plan: RunPlan, *target: str) -> str:
    """Return the command that goes on with a `target`: `--batch ID`, or a file."""
    words = ["stepfleet", "run", *target, "--agents", plan.agents]
    if plan.workers != 1:
        words += ["--workers", str(plan.workers)]
    if plan.slots is not None:
        words += ["--slots", str(plan.slots)]
    if simulated := plan.simulated.wanted():
        words += simulated.options
    if plan.out is not None:
        words += ["--out", str(plan.out), *plan.results.words]
    return shlex.join(words) + data_option()


def run(plan: RunPlan) -> int:
    """Run a file of inputs: Redis, workers, progress and results, all in one command.

    Uses the Redis in STEPFLEET_REDIS_URL, or a private one. One file is one batch: Ctrl-C pauses,
    the same command resumes it.
    """
    fleet = plan.fleet
    check_options(plan)
    agents = load_agents(plan.agents)
    with contextlib.ExitStack() as holds:
        file, same, used = plan.file, "", list[AgentConfig]()
        plan = replace(plan, agent=default_agent(agents, plan.agent))
        if file is not None:
            if plan.out is not None:
                check_apart(plan.out, file)
            file = holds.enter_context(named_file(file))
            if plan.from_stdin and (text := text_of(file)) is not None:
                return ask_agent(_question(plan, agents, text))
            same, used = _read_input(plan, file, agents)
        if plan.out is not None:
            check_writable(plan.out)
        folder = DataFolder.prepare(plan.data)
        notes = RunNotes(folder.notes)
        note = None if plan.again else notes.read(plan.batch or same)
        if plan.lines.only_new:
            note = notes.read(of_file(plan)) or note
        if note is None:
            asyncio.run(_check_calls(plan, used))
        if not plan.again:
            batch_id = note.batch_id if note else plan.batch or ""
            lock = notes.working_on(batch_id or same, *is_run_by(batch_id))
            holds.enter_context(lock)
        plan = with_out(plan, note)
        holds.enter_context(only_writer(plan.out))
        settings = holds.enter_context(local_redis(folder.root))
        warn_of(settings.store, patience=settings.patience, prefix=settings.prefix)
        private = load_settings().redis_url is None
        crew = Crew(fleet, agents, folder, settings, private)
        return asyncio.run(_Run(plan, file, crew, notes, same, used, note, holds).to_its_end())


def _question(plan: RunPlan, agents: dict[str, Agent], text: str) -> Question:
    if plan.agent is None:
        msg = f"--agent is missing: which of {', '.join(sorted(agents))} is the text for?"
        raise ConfigurationError(msg)
    if plan.out is not None:
        raise ConfigurationError("--out is for lines of JSON; a line of text is answered here")
    return Question(plan.agent, text, plan.fleet, plan.data, plan.json)


def _read_input(
    plan: RunPlan, file: Path, agents: dict[str, Agent]
) -> tuple[str, list[AgentConfig]]:
    """Return the identity of the command, and the agents that the file's lines use."""
    with open_input(file, plan.lines.input_format) as source:
        content = digest_of(source, plan.lines)
        used = configs_used((line.data for line in source), agents, plan.agent)
    return identity(content, plan.agent, agents, plan.simulated.rules), used


async def _check_calls(plan: RunPlan, used: list[AgentConfig]) -> None:
    """Check that the agents' models can be called. Raises `ConfigurationError` with the fix."""
    if plan.simulated.rules is None and not plan.no_check:
        check_models(used, os.environ)
        await check_calls(used, os.environ, notice)


_SAY_SECONDS = 5.0


def code_of(*, completed: int, total: int) -> int:
    """Return the exit code of a batch: 0 when every run completed."""
    return COMPLETED if completed == total else SOME_FAILED


@dataclass
class _Run:
    """One `run` command and its batch. `same` is its identity, empty without a file.

    `file` is the plan's, or a copy of standard input.
    """

    plan: RunPlan
    file: Path | None
    crew: Crew
    notes: RunNotes
    same: str
    used: list[AgentConfig]
    note: Note | None
    holds: contextlib.ExitStack
    last: BatchProgress | None = None
    refused: bool = False
    """Whether a model cannot be called: the batch stays as it is."""
    submitted: int = 0
    answer: AgentRunResult | None = None
    """Of a single line on standard input."""

    async def to_its_end(self) -> int:
        """Submit or resume the batch, run it, and print its outcome; return the exit code."""
        started = time.monotonic()
        ended = await self.crew.beside(self._submit_and_collect, self._pause)
        if ended is None:
            self._print_interrupted()
            return INTERRUPTED
        if self.answer is not None:
            return print_answer(self.answer, json=self.plan.json)
        seconds = time.monotonic() - started
        print_ended(ended, seconds, json=self.plan.json)
        self._print_next_commands(ended)
        return code_of(completed=ended.progress.completed, total=ended.progress.total)

    async def _submit_and_collect(self, fleet: AsyncFleet) -> EndedBatch:
        own = self.plan.batch or (self.note.batch_id if self.note else "")
        plan = replace(self.plan, results=ResultOptions())
        again = partial(command_of, plan, "--batch")
        await self.crew.settle_others(fleet, own, self.notes, again)
        batch = await self._known(fleet)
        if batch is None or self.plan.lines.only_new:
            batch = await self._submit(fleet)
        if self.plan.retry_failed:
            await self._retry(batch)
        if (await batch.progress()).open:
            self.crew.needed.set()
        with self.crew.display as display:
            ended = await follow(fleet, batch, self.plan.results, display)
        if self.plan.from_stdin and ended.progress.total == 1:
            async for result in batch.results(follow=False):
                self.answer = result
        return ended

    async def _known(self, fleet: AsyncFleet) -> AsyncBatch | None:
        """Return the batch that the command goes on with; None where there is none, or a part."""
        if self.plan.batch:
            batch = await fleet.batches.get(self.plan.batch)
        else:
            batch = None
            with contextlib.suppress(ConfigurationError):  # another store, or past its retention
                batch = await fleet.batches.get(self.note.batch_id) if self.note else None
        progress = await batch.progress() if batch else None
        if batch is None or progress is None or progress.past_retention >= max(progress.total, 1):
            if self.plan.retry_failed:
                msg = "--retry-failed: no batch here has run this file; run it without the option"
                raise ConfigurationError(msg)
            if self.note:  # its batch is gone: this is a new one
                await self._check_models(self.used)
                self.note = None
            return None
        await self._check_agents(progress)
        self._print_known(progress)
        if not progress.ended:
            await batch.resume()
        if self.plan.file and not progress.sealed and not progress.cancel_requested:
            return None  # the rest of it is submitted
        return batch

    async def _check_agents(self, progress: BatchProgress) -> None:
        """Raise `ConfigurationError` where the command's workers cannot run the batch."""
        names = progress.agent.split(", ") if self.plan.batch and self.crew.agent_names else []
        agents = self.crew.agents
        lacking = [name for name in names if name not in agents]
        if lacking:
            msg = (
                f"batch {progress.batch_id} runs agent {lacking[0]!r}; --agents has "
                f"{', '.join(sorted(agents))}"
            )
            raise ConfigurationError(msg)
        if not progress.ended or self.plan.retry_failed or self.plan.lines.only_new:
            await self._check_models(self.used or [agents[name].config for name in names])

    async def _check_models(self, used: list[AgentConfig]) -> None:
        try:
            await _check_calls(self.plan, used)
        except ConfigurationError:
            self.refused = True
            raise

    def _print_known(self, progress: BatchProgress) -> None:
        if not progress.ended:
            notice(f"Resuming batch {progress.batch_id}: {progress.done} of {progress.total} ended")
        elif not (self.plan.retry_failed or self.plan.lines.only_new):
            how = "was cancelled" if progress.cancel_requested else "has run this file"
            again = "" if self.plan.batch else "; a new batch, paid again: --again"
            notice(
                f"Batch {progress.batch_id} {how} on {progress.created:%Y-%m-%d %H:%M} UTC{again}"
            )

    async def _retry(self, batch: AsyncBatch) -> None:
        retried = await batch.retry(**overrides_of(self.plan.raised))
        notice(f"{retried} runs of batch {batch.id} are retried at their failed step")

    async def _submit(self, fleet: AsyncFleet) -> AsyncBatch:
        note = self.note or self._new_note()
        self.note = note
        await self._warn_of_other_workers(fleet)
        await self._say_of_earlier(fleet, note)
        if self.file is None:  # a batch by its id, which is known
            raise ConfigurationError(f"batch {note.batch_id} is incomplete: run its file")
        saying = asyncio.create_task(self._say_how_far())
        try:
            batch = await fleet.submit_batch(
                self.file,
                self.plan.agent,
                agents=self.crew.agents,
                idempotency_key=note.key,
                name="standard input" if self.plan.from_stdin else self.file.name,
                on_progress=self._on_submitted,
                **asdict(self.plan.lines),
            )
        finally:
            saying.cancel()
        print_skipped(batch)
        self.notes.write(note, self.same, of_file(self.plan))
        return batch

    async def _say_of_earlier(self, fleet: AsyncFleet, note: Note) -> None:
        """Say that a changed file, or changed agents, make another batch, which is paid whole."""
        file = of_file(self.plan)
        earlier = self.notes.read(file) if file and not self.plan.again else None
        if earlier is None or earlier.batch_id == note.batch_id:
            return
        with contextlib.suppress(ConfigurationError):  # another store, or past its retention
            had = await (await fleet.batches.get(earlier.batch_id)).progress()
            notice(
                f"{self.plan.file} or its agents have changed since batch {had.batch_id} "
                f"({had.completed:,} of {had.total:,} completed): all its rows are run, as "
                "another batch. Only rows that were added: Ctrl-C, and this command with --only-new"
            )

    def _on_submitted(self, runs: int) -> None:
        if not self.submitted and self.note:  # not before: a refused file leaves its batch as it is
            self.notes.write(self.note, of_file(self.plan))
        self.submitted = runs
        self.crew.needed.set()

    async def _say_how_far(self) -> None:
        """Say again and again how far a long submission is, also while Redis takes none."""
        while True:
            before = self.submitted
            await asyncio.sleep(_SAY_SECONDS)
            text = f"Submitting: {self.submitted:,} runs so far"
            if self.submitted == before:
                text += "; Redis takes no more at the moment" if before else ", reading the lines"
            self.crew.display.notice(text)

    async def _warn_of_other_workers(self, fleet: AsyncFleet) -> None:
        """Warn of other workers on this Redis that do not have the agents."""
        others = [worker for worker in (await fleet.overview()).workers if worker.alive]
        names = self.crew.agent_names
        lacking = sorted({name for name in names for worker in others if name not in worker.agents})
        if lacking:
            notice(
                f"WARNING: other workers on this Redis have no agent {lacking[0]!r}: steps that "
                "they take are requeued and count as failed attempts (model_attempts). Fix: unset "
                "STEPFLEET_REDIS_URL for a private Redis, or start those workers with this agent"
            )

    def _new_note(self) -> Note:
        out = self.plan.out
        if out is not None and not is_empty(out):
            msg = (
                f"--out {out}: its results are not of this batch (file, agents or store have "
                "changed); name another file, or remove this one; with rows added: --only-new"
            )
            raise ConfigurationError(msg)
        note = Note(new_key(), str(out.absolute()) if out else "", results=self.plan.results.form)
        note = replace(note, command=command_of(self.plan, "--batch", note.batch_id))
        self.holds.enter_context(self.notes.working_on(note.batch_id, *is_run_by(note.batch_id)))
        self.notes.write(note, self.same)
        return note

    async def _pause(self, fleet: AsyncFleet) -> None:
        """Pause the batch, so that no other command's workers go on with it unasked."""
        batch_id = self.plan.batch or (self.note.batch_id if self.note else "")
        if self.refused or not batch_id:
            return
        try:
            batch = await fleet.batches.get(batch_id)
        except ConfigurationError:  # nothing of it was submitted
            return
        if not (await batch.progress()).ended:
            await batch.pause()
            self.last = await batch.progress()

    def _print_interrupted(self) -> None:
        last = self.last
        if last is None:
            notice("Interrupted. The same command resumes the batch, or completes its results.")
            return
        data = data_option()
        notice(f"Interrupted. Batch {last.batch_id} is paused; the same command resumes the batch.")
        if last.sealed:
            notice(f"  resume: {self._command(last)}")
        notice(f"  cancel: stepfleet cancel --batch {last.batch_id}{data}")

    def _print_next_commands(self, ended: EndedBatch) -> None:
        progress, data = ended.progress, data_option()
        again = f"{self._command(progress)} --retry-failed{raises(ended.failures.groups)}"
        results = f"stepfleet results {progress.batch_id}{data}"
        if self.plan.out:
            notice(f"Results: {self.plan.out}. Short: {results} --fields id,output")
        else:
            notice(f"Results: {results} (with --fields id,output, or --out FILE)")
        listed = f"stepfleet ls --batch {progress.batch_id}{data}"
        notice(f"A run with its steps: stepfleet show ID{data}. The ids: {listed}")
        if progress.held:
            notice(
                f"Held: {progress.held}. Fix it, then: {again} "
                "(it resumes the batch, and retries those that failed)"
            )
        elif progress.completed < progress.total:
            notice(
                f"Why: stepfleet failures {progress.batch_id}{data}, "
                f"stepfleet explain ID{data}. "
                f"Again: {again}"
            )

    def _command(self, progress: BatchProgress) -> str:
        return command_of(self.plan, "--batch", progress.batch_id)
