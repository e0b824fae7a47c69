"""Whole steps run in the test's own loop: real store, real tools, a model that follows a script."""

import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from support.runs.stored_runs import Bench

from stepfleet.orchestrator import (
    LLM,
    Agent,
    FinishReason,
    LLMResponse,
    ModelRequest,
    ToolCall,
    UsageStats,
)
from stepfleet.orchestrator.protocol.claim import Work
from stepfleet.orchestrator.records.calls.answers import Awaited
from stepfleet.worker.agents.local import LocalAgents
from stepfleet.worker.engine.concurrency import ConcurrencyLimiter
from stepfleet.worker.leases.lease import Leases
from stepfleet.worker.models import Models
from stepfleet.worker.ports import Ports
from stepfleet.worker.step import Report, run_work
from stepfleet.worker.toolbox.box import LocalToolbox

USAGE = UsageStats(prompt_tokens=10, completion_tokens=5, total_tokens=15)


def say(text: str, **fields: Any) -> LLMResponse:
    """Return an answer without tool calls."""
    return LLMResponse(content=text, usage=USAGE, model="script", **fields)


def call(*names_and_arguments: tuple[str, dict[str, Any]], text: str = "") -> LLMResponse:
    """Return an answer that asks for tools."""
    calls = tuple(
        ToolCall(id=f"c{index}", name=name, arguments=arguments)
        for index, (name, arguments) in enumerate(names_and_arguments)
    )
    return LLMResponse(
        content=text,
        tool_calls=calls,
        usage=USAGE,
        model="script",
        finish_reason=FinishReason.TOOL_CALLS,
    )


@dataclass
class Script(LLM):
    """Answers the n-th request of a conversation by its number of assistant messages.

    An entry is an answer, an exception to raise, or a coroutine function to ask.
    """

    answers: Sequence[Any]
    requests: list[ModelRequest] = field(default_factory=list)

    async def generate(self, request: ModelRequest) -> LLMResponse:
        self.requests.append(request)
        turn = sum(message.is_assistant() for message in request.messages)
        answer = self.answers[min(turn, len(self.answers) - 1)]
        if isinstance(answer, Exception):
            raise answer
        if callable(answer):
            answer = await answer(request)
        assert isinstance(answer, LLMResponse)
        return answer


async def _admitted(*_: Any) -> None:
    """Admit every call."""


async def _nothing(*_: Any) -> None:
    """Find no agent, and no run."""


async def _later(*_: Any) -> float:
    return 5.0


ALONE: dict[str, Any] = {
    "admit": _admitted,
    "successor": _nothing,
    "stop_run": _nothing,
    "attend": dict.fromkeys(Awaited, _later),
}
"""The ports of a step that waits for no limit, no other run and no person."""


class Crash(BaseException):
    """What stands for the end of the process at a crash point; no code catches it."""


@dataclass
class Hands:
    """A worker's hands: does single steps of runs."""

    desk: Bench
    agent: Agent
    crash_at: str = ""
    leases: Leases = field(default_factory=lambda: Leases(time.monotonic))
    models: Models = field(default_factory=Models)
    pacing: ConcurrencyLimiter = field(default_factory=ConcurrencyLimiter)

    async def step(self, run_id: str, step: int) -> Report:
        """Do one step."""
        ports = self.ports()
        with ports.pacing:
            return await run_work(Work(run_id, step), ports, self.leases)

    async def call(self, run_id: str, step: int, index: int) -> Report:
        """Make one tool call that the run waits for, as a task of its own."""
        hint = Work(run_id, step, index)
        return await run_work(hint, self.ports(), self.leases)

    async def finish(self, run_id: str, most: int = 20) -> None:
        """Do steps until the run has ended."""
        for _ in range(most):
            stored = await self.desk.stored(run_id)
            if stored.state.status.is_terminal:
                return
            await self.step(run_id, stored.step)
        raise AssertionError(f"run {run_id} did not end in {most} steps")

    def ports(self) -> Ports:
        """Return ports over the desk's store."""
        return Ports(
            store=self.desk.steps,
            calls=self.desk.steps.calls,
            agent=LocalAgents([self.agent], self.models).find,
            toolbox=LocalToolbox(4),
            cost=lambda _model, usage, *_: usage.total_tokens / 1000,
            jitter=random.random,
            token=self.desk.token,
            crash=self._crash(),
            **ALONE,
            worker="test",
            pacing=self.pacing,
        )

    def _crash(self) -> Callable[[str], None]:
        name, _, nth = self.crash_at.partition(":")
        visits = itertools.count(1)

        def visit(point: str) -> None:
            if point == name and next(visits) == int(nth or 1):
                self.crash_at = ""
                raise Crash(point)

        return visit


def requests(hands: Hands) -> list[ModelRequest]:
    """Return what the scripted model was asked."""
    assert isinstance(hands.agent.llm, Script)
    return hands.agent.llm.requests
