"""`stepfleet ask`: one question to an agent, and its answer on standard output.

It is a batch of one line, so that a question whose command was killed is treated as other batches.
"""

import asyncio
import contextlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from stepfleet.orchestrator.agents.agent import Agent
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.orchestrator.batches.files.lines import INPUT_LIMIT
from stepfleet.orchestrator.cli import options
from stepfleet.orchestrator.cli.approvals import call_and_commands, places_of
from stepfleet.orchestrator.cli.crew import Crew
from stepfleet.orchestrator.cli.fleet import DataFolder, local_redis, warn_of
from stepfleet.orchestrator.cli.inputs import standard_input
from stepfleet.orchestrator.cli.model_check import check_models
from stepfleet.orchestrator.cli.notes import Note, RunNotes, new_key
from stepfleet.orchestrator.cli.options import COMPLETED, INTERRUPTED, SOME_FAILED, data_option
from stepfleet.orchestrator.cli.terminal import notice, print_json, shown
from stepfleet.orchestrator.cli.workers import FleetPlan, Simulated
from stepfleet.orchestrator.client.approvals import asks_below
from stepfleet.orchestrator.client.fleet import AsyncFleet
from stepfleet.orchestrator.errors import AgentException, ConfigurationError
from stepfleet.orchestrator.events.envelope import StreamedText
from stepfleet.orchestrator.records import exact_json
from stepfleet.orchestrator.records.run.results import AgentRunResult, RunStatus
from stepfleet.orchestrator.settings.settings import load_settings
from stepfleet.orchestrator.store.batches.batches import run_id_of


def ask(
    agent: Annotated[str, typer.Argument(metavar="AGENT", help="The agent's name.")],
    text: Annotated[str, typer.Argument(metavar="TEXT", help="The question; - reads stdin.")],
    *,
    agents: options.MaybeAgentsRef = None,
    simulated: Simulated,
    json: options.Json = False,
    data: options.Data = options.DATA_FOLDER,
) -> int:
    """Ask an agent one question, and print its answer: text while it is written on a terminal.

    Uses the workers of the Redis in STEPFLEET_REDIS_URL; without it, --agents names the agent's
    module, and a private Redis and a worker are started. Exit code 1: the run did not complete.
    """
    plan = plan_for(agents, FleetPlan(agents or "", 1, simulate=simulated.wanted()), data)
    question = standard_input() if text == "-" else text
    return ask_agent(Question(agent, question, plan, data, json))


_LOOK = 1.0
"""Seconds between two looks at what waits for people."""


@dataclass(frozen=True, slots=True)
class Question:
    """A text for an agent; `fleet` has no agents' module where existing workers have the agent."""

    agent: str
    text: str
    fleet: FleetPlan
    data: Path
    json: bool


def ask_agent(question: Question) -> int:
    """Print the agent's answer; return the exit code: 1, with the cause, for an incomplete run.

    Raises `AgentException` with the fix for every user's error.
    """
    plan, name = question.fleet, question.agent
    if not question.text.strip():
        raise ConfigurationError("the question is empty; write it after the agent's name")
    agents = load_agents(plan.agents) if plan.agents else {}
    if agents and name not in agents:
        msg = f"no such agent: {name}; --agents has {', '.join(sorted(agents))}"
        raise ConfigurationError(msg)
    if plan.workers and plan.simulate is None:
        check_models([agents[name].config], os.environ)
    private = load_settings().redis_url is None
    folder = DataFolder.prepare(question.data)
    notes, note = RunNotes(folder.notes), Note(new_key("ask"))
    with notes.working_on(note.batch_id, "", ""), local_redis(folder.root) as settings:
        warn_of(settings.store, patience=settings.patience, prefix=settings.prefix)
        crew = Crew(plan, agents, folder, settings, private)
        return asyncio.run(_Asking(question, crew, notes, note).to_its_end())


def plan_for(agents: str | None, given: FleetPlan, data: Path) -> FleetPlan:
    """Return the `given` plan, or one without workers of its own where others do the work.

    Those are the workers of the Redis in the settings, or of `stepfleet up` in the data folder.
    Raises `ConfigurationError` where there is neither, or a simulated provider for the others.
    """
    configured = load_settings().redis_url is not None
    if not configured and agents:
        return given
    if given.simulate is not None:
        fix = "unset STEPFLEET_REDIS_URL" if configured else "name the agents, --agents FILE"
        raise ConfigurationError(f"--simulate needs workers of this command: {fix}")
    if not configured and not (data / "redis-url").exists():
        msg = "name the agent's module, --agents FILE, or start its fleet: stepfleet up --agents"
        raise ConfigurationError(msg)
    return FleetPlan(agents or "", 0)


@dataclass
class _Asking:
    question: Question
    crew: Crew
    notes: RunNotes
    note: Note
    text: StreamedText = field(default_factory=StreamedText)

    async def to_its_end(self) -> int:
        result = await self.crew.beside(self._ask, self._cancel)
        if result is None:
            notice("Interrupted: the question is cancelled")
            return INTERRUPTED
        return print_answer(result, json=self.question.json, shown_before=self._streamed)

    async def _ask(self, fleet: AsyncFleet) -> AgentRunResult:
        await self._settle(fleet)
        question = self.question
        known: Mapping[str, Agent] = self.crew.agents
        overrides: Any = {"broadcast": {"include_stream_chunks": True}} if self._streams else {}
        batch = await fleet.submit_batch(
            [{"id": "1", "input": question.text}],
            question.agent,
            agents=known or None,
            idempotency_key=self.note.key,
            name=f"ask: {shown(question.text, 40)}",
            **overrides,
        )
        self.crew.needed.set()
        run_id = run_id_of(batch.id, 0)
        notes = asyncio.create_task(_print_waiting_calls(fleet, run_id))
        try:
            if self._streams:
                await self._print_text(fleet, run_id)
            return await fleet.runs.wait(run_id)
        finally:
            notes.cancel()
            await asyncio.wait([notes])

    async def _settle(self, fleet: AsyncFleet) -> None:
        """Keep other batches out of our workers; without such, see that there are others."""
        if self.crew.plan.workers == 0:
            seen = await fleet.overview()
            if seen.troubles:  # workers cannot report; the wait names it as long as it lasts
                return
            if not any(one.alive for one in seen.workers):
                msg = (
                    "no worker is alive on this Redis: start one (stepfleet worker --agents "
                    "MODULE), or unset STEPFLEET_REDIS_URL and name --agents for a private fleet"
                )
                raise ConfigurationError(msg)
            return
        agents = self.crew.plan.agents
        await self.crew.settle_others(
            fleet,
            self.note.batch_id,
            self.notes,
            lambda one: f"stepfleet run --batch {one} --agents {agents}{data_option()}",
        )

    @property
    def _streams(self) -> bool:
        return sys.stdout.isatty() and not self.question.json

    @property
    def _streamed(self) -> str:
        return self.text.text

    async def _print_text(self, fleet: AsyncFleet, run_id: str) -> None:
        """Print the text of each step while the model writes it."""
        step, printed = 0, ""
        async for event in fleet.runs.events(run_id, chunks=True):
            if not self.text.add(event):
                continue
            number, text = event["payload"]["step_number"], self.text.text
            if number != step or not text.startswith(printed):
                sys.stdout.write("\n" if printed else "")
                step, printed = number, ""
            sys.stdout.write(shown(text[len(printed) :]))
            sys.stdout.flush()
            printed = text

    async def _cancel(self, fleet: AsyncFleet) -> None:
        with contextlib.suppress(ConfigurationError):  # it was not submitted
            await (await fleet.batches.get(self.note.batch_id)).cancel()


async def _print_waiting_calls(fleet: AsyncFleet, run_id: str) -> None:
    """Print each call of the run, and of the runs below it, that waits for a person."""
    printed: set[str] = set()
    while True:
        await asyncio.sleep(_LOOK)
        with contextlib.suppress(AgentException):  # whoever waits for the run reports it
            below = await asks_below(await fleet.runs.tree(run_id), fleet.approvals)
            approvals = (*await fleet.approvals.of_run(run_id), *below)
            places = places_of(approvals)
            for approval in approvals:
                if approval.key not in printed:
                    notice(call_and_commands(approval, places[approval.key]))
            printed = {approval.key for approval in approvals}


def print_answer(result: AgentRunResult, *, json: bool, shown_before: str = "") -> int:
    """Print a run's answer, or its whole result as JSON; return the exit code.

    The cause of an incomplete run goes to standard error.
    """
    if json:
        print_json(result.to_dict())
    else:
        _print_text(result, shown_before)
    if result.shortened:
        notice(f"The answer was {result.shortened}")
    if result.status is RunStatus.COMPLETED:
        return COMPLETED
    why = result.error or (str(result.explaining) if result.explaining else "")
    cause = f": {shown(why)}" if why else ""
    notice(f"{result.agent_name} did not complete ({result.stop_reason}){cause}")
    notice(f"Why: stepfleet explain {result.run_id}{data_option()}")
    return SOME_FAILED


def _print_text(result: AgentRunResult, shown_before: str) -> None:
    answer = result.output
    if answer is None and result.structured is not None:
        answer = exact_json.text(result.structured)
    if answer is None or (shown_before and answer.strip() == shown_before.strip()):
        answer = ""
    terminal = sys.stdout.isatty()
    text = shown(answer) if terminal else answer
    sys.stdout.write(("\n" if shown_before else "") + text + ("\n" if text else ""))
    sys.stdout.flush()


def text_of(file: Path) -> str | None:
    """Return the question in a file of inputs that is one line of plain text; else None."""
    with file.open("rb") as opened:
        raw = opened.read(INPUT_LIMIT + 1)
    if len(raw) > INPUT_LIMIT:
        return None
    lines = [line for line in raw.splitlines() if line.strip()]
    if len(lines) != 1 or lines[0].lstrip()[:1] in (b"{", b"["):
        return None
    try:
        return lines[0].decode().strip()
    except UnicodeDecodeError:
        return None
