"""A fleet in one process: a private server, and steps that are executed here, for development.

The worker's code is imported where it is used, by its name: clients are installed without it.
"""

import asyncio
import shutil
import tempfile
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any
from uuid import UUID

from pydantic import SecretStr

from stepfleet.orchestrator.agents.agent import Agent
from stepfleet.orchestrator.client.checkpoints import AgentCheckpoint
from stepfleet.orchestrator.client.inputs import Input
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.records.calls.tools import ToolCallRecord
from stepfleet.orchestrator.records.conversation.messages import Message, value_text
from stepfleet.orchestrator.records.errors import ErrorInfo
from stepfleet.orchestrator.records.run.results import AgentRunResult
from stepfleet.orchestrator.records.steps import LoggedStep
from stepfleet.orchestrator.settings.settings import DAY, Settings
from stepfleet.orchestrator.store.embedded import EmbeddedRedis

INLINE = "stepfleet.worker.runtime.inline"
SHOWN = 1000
"""Characters of one text that a debugged step prints."""


class LocalFleet:
    """The private server of a folder, and a worker in a thread; `folder` None is a temporary one.

    `agents` are those of the worker; without any it executes nothing.
    """

    def __init__(self, agents: Iterable[Agent] = (), folder: str | Path | None = None) -> None:
        self._agents = tuple(agents)
        self._folder = None if folder is None else Path(folder).expanduser().absolute()
        self._temporary = ""
        self._server: EmbeddedRedis | None = None
        self._worker: Any = None

    def only_agent(self) -> Agent | None:
        """Return the worker's agent, where it has just one."""
        return self._agents[0] if len(self._agents) == 1 else None

    def settings(self, settings: Settings) -> Settings:
        """Start or join the server, and return `settings` with its address.

        Raises `ConfigurationError` with the fix where there is none.
        """
        if self._folder is None:
            self._temporary = tempfile.mkdtemp(prefix="stepfleet-")
        try:
            self._server = EmbeddedRedis.start(self._folder or self._temporary, brief=True)
        except BaseException:
            self.stop()
            raise
        return private(settings, self._server.url)

    def work(self, settings: Settings) -> None:
        """Start the worker; it is connected when this returns. Raises as `settings` does."""
        if self._agents:
            self._worker = worker_code("Fleet.local()").LocalWorker(settings, self._agents)
            self._worker.start()

    def stop(self) -> None:
        """Stop the worker (its open runs go to another), and leave the server."""
        worker, self._worker = self._worker, None
        server, self._server = self._server, None
        try:
            if worker is not None:
                worker.stop()
        finally:
            if server is not None:
                server.stop()
            if self._temporary:
                shutil.rmtree(self._temporary, ignore_errors=True)


def private(settings: Settings, url: str) -> Settings:
    """Return settings for a private server: nothing leaves it, no lease ends at a prompt."""
    changes = {
        "redis_url": SecretStr(url),
        "broker_url": None,
        "enqueue": "auto",
        "blocked_limit": float(DAY),
    }
    return settings.model_copy(update=changes)


def worker_code(wanted: str) -> Any:
    """Return the module that executes steps here. Raises `ConfigurationError` naming the extra."""
    try:
        return import_module(INLINE)
    except ImportError as error:
        msg = (
            f"{wanted} executes steps in this process, and the package {error.name!r} that workers "
            "need is missing: pip install 'stepfleet[local]'"
        )
        raise ConfigurationError(msg) from None


@dataclass(frozen=True, slots=True)
class DebugStep:
    """One attempt at a step: print it, or look at its parts.

    `messages` are those that the step added, `calls` its tool calls with results and errors.
    `error` is set where the attempt failed; `delay` are the seconds until it is repeated.
    `result` is the run's, so far.
    """

    step: int
    logged: LoggedStep | None
    result: AgentRunResult
    error: ErrorInfo | None = None
    delay: float = 0.0

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages that the step added to the conversation."""
        return self.logged.messages if self.logged else ()

    @property
    def calls(self) -> tuple[ToolCallRecord, ...]:
        """The step's tool calls, with their results and errors."""
        return self.logged.result.tool_calls if self.logged else ()

    @property
    def decision(self) -> str:
        """What was decided after the step, and why."""
        if self.error is not None and not self.result.stop_reason:
            return f"the step is repeated in {self.delay:.1f} s"
        if self.result.stop_reason is not None:
            why = self.result.outcome.reason if self.result.outcome else ""
            return f"the run ends: {self.result.stop_reason} ({why or self.result.error or ''})"
        outcome = self.logged.outcome if self.logged else None
        return f"the run goes on ({outcome.reason if outcome else 'no criterion was evaluated'})"

    def __str__(self) -> str:
        """Return the step as lines of text, long texts cut."""
        lines = [f"step {self.step} of run {self.result.run_id}"]
        if self.logged is not None:
            result = self.logged.result
            tokens = result.usage.total_tokens if result.usage else 0
            cost = f"{result.cost_usd or 0:.6f} USD"
            lines[0] += f": {result.duration_ms / 1000:.2f} s, {tokens} tokens, {cost}"
            if text := next((one.text for one in self.messages if one.is_assistant()), ""):
                lines.append(f"  model: {_cut(text)}")
        for call in self.calls:
            arguments = ", ".join(f"{key}={value!r}" for key, value in call.arguments.items())
            ended = f"error: {call.error.message}" if call.error else value_text(call.result)
            lines += [f"  call:  {_cut(f'{call.tool_name}({arguments})')}", f"    -> {_cut(ended)}"]
        if self.error is not None:
            lines.append(f"  error: {_cut(self.error.message)}")
        return "\n".join([*lines, f"  {_cut(self.decision)}"])


DebugSteps = AsyncGenerator[DebugStep, None]


@dataclass(frozen=True, slots=True)
class DebugOrder:
    """What is debugged: an input, or a run's checkpoint, with that agent."""

    agent: Agent
    given: Input
    checkpoint: AgentCheckpoint | None = None


@asynccontextmanager
async def private_fleet(settings: Settings) -> AsyncGenerator[Settings, None]:
    """Give the settings of a temporary server of one's own, whose leases outlast a prompt."""
    local = LocalFleet()
    found = await asyncio.to_thread(local.settings, settings)
    changes = {"lease": float(DAY), "webhooks": (), "events_url": None, "metrics_port": None}
    try:
        yield found.model_copy(update=changes)
    finally:
        await asyncio.to_thread(local.stop)


async def stepped(
    settings: Settings, agents: Iterable[Agent], submit: Callable[[], Any]
) -> DebugSteps:
    """Yield the steps of the run that `submit` creates, each executed by the next `anext`.

    Tools run in the calling thread, and no time limit of theirs holds.
    """
    worker_type = worker_code("debug()").InlineWorker
    async with worker_type(settings, agents, stepping=True) as worker:
        run_id = await submit()
        while (attempt := await worker.step(run_id)) is not None:
            report, run = attempt
            verdict = report.verdict
            _end_if_quit(verdict.logged if verdict else None)
            yield DebugStep(
                step=report.work.step + 1,
                logged=verdict.logged if verdict else None,
                result=run.result(),
                error=_error_of(verdict),
                delay=verdict.delay if verdict else 0.0,
            )


def _end_if_quit(logged: LoggedStep | None) -> None:
    """Raise `bdb.BdbQuit` where a person has left the debugger in one of the step's tools."""
    calls = logged.result.tool_calls if logged else ()
    if "BdbQuit" in (call.error.message for call in calls if call.error):
        raise import_module("bdb").BdbQuit


def is_run_id(given: object) -> bool:
    """Return whether that is the id of a run, and no input of a new one."""
    try:
        return isinstance(given, str) and str(UUID(given)) == given.lower()
    except ValueError:
        return False


def _error_of(verdict: Any) -> ErrorInfo | None:
    if verdict is None:
        return None
    errors = verdict.logged.result.problems if verdict.logged else ()
    found: ErrorInfo | None = verdict.failure or (errors[0] if errors else None)
    return found


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]} ... ({len(text) - SHOWN} more)"
