"""Subscribers: functions of this process for events by type, all events, or the stages of a step.

A function that fails is logged, and the others are called all the same. Knows no transport.
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
Returned = Awaitable[None] | None
SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Moment:
    """The step of a run at which a callback is called, counted from 1."""

    run_id: str
    agent: str
    step: int
    execution_id: str


class Subscribers:
    """Functions to call, plain ones or coroutine functions.

    The four callbacks are called with a `Moment` and a value: `step_start` with the state before
    the step, `llm_response` with the model's answer (not when a journaled one is used again),
    `step_end` with the committed step, `agent_finish` with the state after the last one.
    `failures` counts calls that raised or took longer than half a minute.
    """

    def __init__(
        self,
        *,
        step_start: Callable[[Moment, AgentState], Returned] | None = None,
        llm_response: Callable[[Moment, LLMResponse], Returned] | None = None,
        step_end: Callable[[Moment, StepResult], Returned] | None = None,
        agent_finish: Callable[[Moment, AgentState], Returned] | None = None,
    ) -> None:
        self.callbacks: dict[str, Callable[[Moment, Any], Returned] | None] = {
            "step_start": step_start,
            "llm_response": llm_response,
            "step_end": step_end,
            "agent_finish": agent_finish,
        }
        self._by_type: list[tuple[type[DomainEvent], Callable[[Any], Returned]]] = []
        self.failures = 0

    def on(self, kind: type[E], function: Callable[[E], Returned]) -> "Subscribers":
        """Call `function` with every event of that type; returns the subscribers."""
        self._by_type.append((kind, function))
        return self

    def wiretap(self, function: Callable[[DomainEvent], Returned]) -> "Subscribers":
        """Call `function` with every event; returns the subscribers."""
        return self.on(DomainEvent, function)

    async def broadcast(self, channel: str, envelope: Mapping[str, Any]) -> None:
        """Publish the events of an envelope. Raises nothing that a function raises."""
        del channel
        for event in from_envelope(envelope):
            await self.publish(event)

    async def publish(self, event: DomainEvent, *, in_thread: bool = False) -> None:
        """Call all functions for its type; `in_thread` calls plain ones in a thread."""
        for kind, function in self._by_type:
            if isinstance(event, kind):
                await self._call(function, event, in_thread=in_thread)

    async def call(self, name: str, moment: Moment, value: Any, *, in_thread: bool = False) -> None:
        """Call one of the four callbacks, if it is there."""
        function = self.callbacks.get(name)
        if function is not None:
            await self._call(function, moment, value, in_thread=in_thread)

    async def _call(self, function: Callable[..., Returned], *args: Any, in_thread: bool) -> None:
        try:
            async with asyncio.timeout(SECONDS):
                if in_thread and not inspect.iscoroutinefunction(function):
                    returned = await asyncio.to_thread(function, *args)
                else:
                    returned = function(*args)
                if returned is not None:
                    await returned
        except Exception:
            self.failures += 1
            log.exception("a subscriber failed")
