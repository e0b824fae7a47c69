"""What a step's model call tells while it is made: its text as it is written, its answer.

For runs that ask for chunks and agents with subscribers; every other call is made as it is.
"""

from collections.abc import Awaitable, Callable
from typing import Protocol

from stepfleet.orchestrator.events.subscribers import Subscribers
from stepfleet.orchestrator.protocol.claim import Claim
from stepfleet.orchestrator.records.responses import LLMResponse, ModelRequest
from stepfleet.worker.events.subscribers import SubscriberQueue, moment_of
from stepfleet.worker.events.text_chunks import ChunkSender

Ask = Callable[[ModelRequest], Awaitable[LLMResponse]]


class Generate(Protocol):
    """Makes a model call; `on_text` hears its text piece by piece."""

    async def __call__(
        self, request: ModelRequest, on_text: Callable[[str], None] | None = None
    ) -> LLMResponse:
        """Return the answer. Raises `ModelError`."""


class Teller:
    """Makes the model calls of steps heard."""

    def __init__(self, chunks: ChunkSender, listening: SubscriberQueue) -> None:
        self._chunks = chunks
        self._listening = listening

    def asking(self, claim: Claim, subscribers: Subscribers | None, generate: Generate) -> Ask:
        """Return what makes the calls of `claim`'s step: `generate` itself if nobody listens."""
        is_streamed = claim.config.broadcast.include_stream_chunks
        if subscribers is None and not is_streamed:
            return generate

        async def ask(request: ModelRequest) -> LLMResponse:
            response = await (
                self._streamed(claim, request, generate) if is_streamed else generate(request)
            )
            if subscribers is not None:
                moment = moment_of(claim)
                self._listening.offer(
                    lambda: subscribers.call("llm_response", moment, response, in_thread=True)
                )
            return response

        return ask

    async def _streamed(
        self, claim: Claim, request: ModelRequest, generate: Generate
    ) -> LLMResponse:
        writer = self._chunks.begin(claim)
        settings = request.settings.model_copy(update={"stream": True})
        asked = request.model_copy(update={"settings": settings})
        response = await generate(asked, writer.add)
        writer.complete()
        return response
