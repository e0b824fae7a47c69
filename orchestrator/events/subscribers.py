"""Functions of this process that listen: to events by type, to all of them, to a step's stages.

Decides who is called; a function that fails is logged and hurts nobody else. Knows no transport.
"""

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from stepfleet.orchestrator.events.domain_events import DomainEvent, from_envelope
from stepfleet.orchestrator.records.responses import LLMResponse
from stepfleet.orchestrator.records.state import AgentState
from stepfleet.orchestrator.records.steps import StepResult

log = logging.getLogger(__name__)

E = TypeVar("E", bound=DomainEvent)
Answer = Awaitable[None] | None
SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Moment:
    """Where a callback is called from: a step of a run, counted from 1."""

    run_id: str
    agent: str
    step: int
    execution_id: str


class Subscribers:
    """Who is told. Functions may be plain or coroutine functions.

    The four callbacks are called with a `Moment` and a value: `step_start` with the state before
    the step, `llm_response` with the model's answer (not when a journaled one is used again),
    `step_end` with the committed step, `agent_finish` with the state behind the last one.
    `failures` counts calls that raised or took longer than half a minute.
    """

    def __init__(
        self,
        *,
        step_start: Callable[[Moment, AgentState], Answer] | None = None,
        llm_response: Callable[[Moment, LLMResponse], Answer] | None = None,
        step_end: Callable[[Moment, StepResult], Answer] | None = None,
        agent_finish: Callable[[Moment, AgentState], Answer] | None = None,
    ) -> None:
        self.callbacks: dict[str, Callable[[Moment, Any], Answer]] = {
            name: function
            for name, function in (
                ("step_start", step_start),
                ("llm_response", llm_response),
                ("step_end", step_end),
                ("agent_finish", agent_finish),
            )
            if function is not None
        }
        self._by_type: list[tuple[type[DomainEvent], Callable[[Any], Answer]]] = []
        self.failures = 0

    def on(self, kind: type[E], function: Callable[[E], Answer]) -> "Subscribers":
        """Call `function` with every event of that type; returns the subscribers."""
        self._by_type.append((kind, function))
        return self

    def wiretap(self, function: Callable[[DomainEvent], Answer]) -> "Subscribers":
        """Call `function` with every event; returns the subscribers."""
        return self.on(DomainEvent, function)

    async def broadcast(self, channel: str, envelope: Mapping[str, Any]) -> None:
        """Tell what an envelope says. Raises nothing that a function raises."""
        del channel
        for event in from_envelope(envelope):
            await self.tell(event)

    async def tell(self, event: DomainEvent, *, apart: bool = False) -> None:
        """Tell one event to all whom it concerns; `apart` calls plain functions in a thread."""
        for kind, function in self._by_type:
            if isinstance(event, kind):
                await self._call(function, event, apart=apart)

    async def call(self, name: str, moment: Moment, value: Any, *, apart: bool = False) -> None:
        """Call one of the four callbacks, if it is there."""
        function = self.callbacks.get(name)
        if function is not None:
            await self._call(function, moment, value, apart=apart)

    async def _call(self, function: Callable[..., Answer], *args: Any, apart: bool) -> None:
        try:
            async with asyncio.timeout(SECONDS):
                if apart and not inspect.iscoroutinefunction(function):
                    answer = await asyncio.to_thread(function, *args)
                else:
                    answer = function(*args)
                if answer is not None:
                    await answer
        except Exception:
            self.failures += 1
            log.exception("a subscriber failed")
