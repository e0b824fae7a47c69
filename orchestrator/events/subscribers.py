"""Subscribers, broadcasters and their configuration: where events of this process go.

A function that fails is logged, and the others are called all the same. Knows no transport.
"""

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self, TypeVar, runtime_checkable

from pydantic import Field, model_validator

from stepfleet.orchestrator.events.domain_events import DomainEvent, from_envelope
from stepfleet.orchestrator.records.base import Record
from stepfleet.orchestrator.records.responses import LLMResponse
from stepfleet.orchestrator.records.state import AgentState
from stepfleet.orchestrator.records.steps import StepResult

Envelope = Mapping[str, Any]


@runtime_checkable
class CanBroadcastAgentEvents(Protocol):
    """Publishes envelopes. The channel is `agent.` and the run's id."""

    async def broadcast(self, channel: str, envelope: Envelope) -> None:
        """Publish one envelope. May raise any exception of its transport."""
        ...


class InProcess:
    """Hands each envelope to a function of this process: `function(channel, envelope)`.

    Exceptions of the function, or of its coroutine, are raised from `broadcast`.
    """

    def __init__(self, function: Callable[[str, Envelope], Awaitable[None] | None]) -> None:
        self._function = function

    async def broadcast(self, channel: str, envelope: Envelope) -> None:
        """Call the function, and await it where it is a coroutine function."""
        returned = self._function(channel, envelope)
        if returned is not None:
            await returned


class BroadcastConfig(Record):
    """The events of an agent's runs; the default is the preset `minimal`.

    `include_stream_chunks` streams every model call and publishes its text while it is written;
    `include_continuation_trace` adds an event for every evaluation after a step;
    `include_tool_args` publishes whole arguments, texts cut to `max_arg_length` characters, in
    place of a summary. Without `auto_status_tracking` changes of status are kept in the run's
    record and not broadcast.

    The name of a preset is accepted in its place: `broadcast="debug"`.
    """

    PRESETS: ClassVar[dict[str, dict[str, Any]]] = {
        "minimal": {},
        "standard": {"include_stream_chunks": True},
        "debug": {
            "include_stream_chunks": True,
            "include_continuation_trace": True,
            "include_tool_args": True,
            "max_arg_length": 500,
        },
    }

    include_stream_chunks: bool = False
    include_continuation_trace: bool = False
    include_tool_args: bool = False
    max_arg_length: int = Field(default=100, ge=4)
    auto_status_tracking: bool = True

    @model_validator(mode="before")
    @classmethod
    def _named(cls, given: Any) -> Any:
        if not isinstance(given, str):
            return given
        if given not in cls.PRESETS:
            known = ", ".join(cls.PRESETS)
            raise ValueError(f"{given!r} is not a preset; write one of {known}, or the fields")
        return cls.PRESETS[given]

    @classmethod
    def minimal(cls) -> Self:
        """Return the preset with nothing beyond steps, tools and statuses."""
        return cls()

    @classmethod
    def standard(cls) -> Self:
        """Return the preset that adds the text while it is written."""
        return cls(**cls.PRESETS["standard"])

    @classmethod
    def debug(cls) -> Self:
        """Return the preset that adds everything."""
        return cls(**cls.PRESETS["debug"])


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
