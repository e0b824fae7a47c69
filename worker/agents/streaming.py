"""Streams a step's model call while it is made: its text in chunks, its answer to subscribers.

For runs that ask for chunks and agents with subscribers; every other call is made as it is.
"""

from collections.abc import Awaitable, Callable
from typing import Protocol

from stepfleet.orchestrator.events.subscribers import Subscribers
from stepfleet.orchestrator.protocol.claim import Claim
from stepfleet.orchestrator.records.responses import LLMResponse, ModelRequest
from stepfleet.worker.events.subscribers import SubscriberQueue, moment_of
from stepfleet.worker.events.text_chunks import ChunkSender

Call = Callable[[ModelRequest], Awaitable[LLMResponse]]


class Generate(Protocol):
    """Makes a model call; `on_text` receives its text piece by piece."""

    async def __call__(
        self, request: ModelRequest, on_text: Callable[[str], None] | None = None
    ) -> LLMResponse:
        """Return the answer. Raises `ModelError`."""


class Streaming:
    """Streams the model calls of steps."""

    def __init__(self, chunks: ChunkSender, listening: SubscriberQueue) -> None:
        self._chunks = chunks
        self._listening = listening

    def call_for(self, claim: Claim, subscribers: Subscribers | None, generate: Generate) -> Call:
        """Return what makes the calls of a step: `generate` itself if nothing is streamed."""
        is_streamed = claim.config.broadcast.include_stream_chunks
        if subscribers is None and not is_streamed:
            return generate

        async def call(request: ModelRequest) -> LLMResponse:
            response = await (
                self._streamed(claim, request, generate) if is_streamed else generate(request)
            )
            if subscribers is not None:
                moment = moment_of(claim)
                self._listening.offer(
                    lambda: subscribers.call("llm_response", moment, response, in_thread=True)
                )
            return response

        return call

    async def _streamed(
        self, claim: Claim, request: ModelRequest, generate: Generate
    ) -> LLMResponse:
        writer = self._chunks.begin(claim)
        settings = request.settings.model_copy(update={"stream": True})
        request = request.model_copy(update={"settings": settings})
        response = await generate(request, writer.add)
        writer.complete()
        return response
