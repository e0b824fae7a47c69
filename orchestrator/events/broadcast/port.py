"""The protocol of a broadcaster, which any object can have. Knows no transport."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, runtime_checkable

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
