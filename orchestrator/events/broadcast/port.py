"""What can broadcast events: one protocol that any object can have. Knows no transport."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, runtime_checkable

Envelope = Mapping[str, Any]


@runtime_checkable
class CanBroadcastAgentEvents(Protocol):
    """Takes envelopes to whoever listens. The channel is `agent.` and the session's id."""

    async def broadcast(self, channel: str, envelope: Envelope) -> None:
        """Take one envelope there. May raise whatever its transport does."""
        ...


class InProcess:
    """Hands each envelope to a function of this process: `function(channel, envelope)`.

    What the function raises, or its coroutine, is raised from `broadcast`.
    """

    def __init__(self, function: Callable[[str, Envelope], Awaitable[None] | None]) -> None:
        self._function = function

    async def broadcast(self, channel: str, envelope: Envelope) -> None:
        """Call the function, and await it where it is a coroutine function."""
        answer = self._function(channel, envelope)
        if answer is not None:
            await answer
