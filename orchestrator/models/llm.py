"""A language model as an agent sees it: one protocol that any object can have.

Knows no provider, no HTTP and no worker; adapters live in `stepfleet.worker.models`.
"""

from collections.abc import AsyncIterator
from typing import Protocol, runtime_checkable

from stepfleet.orchestrator.records.responses import LLMResponse, ModelRequest


@runtime_checkable
class LLM(Protocol):
    """A language model: it answers a request, at once or piece by piece.

    Subclass it and write `generate`; `stream` then yields the finished answer as one piece.
    A class of its own that has both methods fits as well. `generate` raises `ModelError` or
    one of its subclasses; `retryable` on it says that the same call may be tried again.
    """

    async def generate(self, request: ModelRequest) -> LLMResponse:
        """Answer `request.messages`, with `request.tools` on offer."""
        ...

    async def stream(self, request: ModelRequest) -> AsyncIterator[str]:
        """Yield the answer's text in pieces; tool calls never appear in them."""
        response = await self.generate(request)
        if response.content:
            yield response.content
