"""Streams a step while it is made: its start, its text, its tools' starts, its model's answer.

For runs that ask for chunks and agents with subscribers; every other call is made as it is. The
commit writes the starts again, as events with numbers: readers leave those out that they know.
"""

from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Protocol

from stepfleet.orchestrator.events.domain_events import (
    AgentStepStarted,
    DomainEvent,
    ToolCallStarted,
    made,
)
from stepfleet.orchestrator.events.envelope import Event, EventType
from stepfleet.orchestrator.events.subscribers import Subscribers
from stepfleet.orchestrator.protocol.claim import Claim
from stepfleet.orchestrator.protocol.commit_events import step_started, tool_started
from stepfleet.orchestrator.protocol.waiting import TakenCall
from stepfleet.orchestrator.records.calls.tools import ToolCall
from stepfleet.orchestrator.records.responses import LLMResponse, ModelRequest
from stepfleet.worker.events.subscribers import SubscriberQueue, moment_of
from stepfleet.worker.events.text_chunks import ChunkSender, LiveStep, LiveWriter

Call = Callable[[ModelRequest], Awaitable[LLMResponse]]
Started = Callable[[ToolCall, datetime], None]
"""Announces that a tool call starts, at that time of Redis."""


class Generate(Protocol):
    """Makes a model call; `on_text` receives its text piece by piece."""

    async def __call__(
        self, request: ModelRequest, on_text: Callable[[str], None] | None = None
    ) -> LLMResponse:
        """Return the answer. Raises `ModelError`."""


class Streaming:
    """Streams steps."""

    def __init__(self, chunks: ChunkSender, listening: SubscriberQueue) -> None:
        self._chunks = chunks
        self._listening = listening

    def call_for(self, claim: Claim, subscribers: Subscribers | None, generate: Generate) -> Call:
        """Return what makes the calls of a step: `generate` itself if nothing is streamed."""
        is_streamed = claim.config.broadcast.include_stream_chunks
        if subscribers is None and not is_streamed:
            return generate
        step, has_begun = LiveStep.of(claim), False

        async def call(request: ModelRequest) -> LLMResponse:
            nonlocal has_begun
            writer = self._chunks.begin(step) if is_streamed else None
            if not has_begun:
                self._begin(step, step_started(claim, claim.now), writer, subscribers)
            has_begun = True
            response = await (_streamed(writer, request, generate) if writer else generate(request))
            if subscribers is not None:
                moment = moment_of(claim)
                self._listening.offer(
                    lambda: subscribers.call("llm_response", moment, response, in_thread=True)
                )
            return response

        return call

    def starts_for(
        self, work: Claim | TakenCall, subscribers: Subscribers | None
    ) -> Started | None:
        """Return what announces the tools of a step; None if nobody listens."""
        broadcast = work.config.broadcast
        if subscribers is None and not broadcast.include_stream_chunks:
            return None
        step, writer = LiveStep.of(work), None
        if broadcast.include_stream_chunks:
            writer = self._chunks.begin(step, anew=step.is_resumed)

        def started(call: ToolCall, at: datetime) -> None:
            payload = tool_started(broadcast, call.name, call.id, call.arguments)
            given = (step.run_id, step.execution_id, at, payload, step.parent)
            event = Event(EventType.TOOL_STARTED, *given)
            if writer is not None:
                writer.start(event)
            if subscribers is not None:
                own = {"tool": call.name, "args": call.arguments, "started_at": at}
                self._publish(step, call.id, made(ToolCallStarted, event, **own), subscribers)

        return started

    def _begin(
        self, step: LiveStep, event: Event, to: LiveWriter | None, subscribers: Subscribers | None
    ) -> None:
        if to is not None:
            to.start(event)
        if subscribers is not None:
            self._publish(step, "", made(AgentStepStarted, event), subscribers)

    def _publish(
        self, step: LiveStep, call_id: str, event: DomainEvent, subscribers: Subscribers
    ) -> None:
        self._listening.announced((step.run_id, step.number, call_id))
        self._listening.offer(lambda: subscribers.publish(event, in_thread=True))


async def _streamed(writer: LiveWriter, request: ModelRequest, generate: Generate) -> LLMResponse:
    settings = request.settings.model_copy(update={"stream": True})
    request = request.model_copy(update={"settings": settings})
    response = await generate(request, writer.add)
    writer.complete()
    return response
