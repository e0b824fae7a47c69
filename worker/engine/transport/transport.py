"""The transports by name: with and without TLS.

Decides which channel and poller a connection gets. Must not know messages.
"""

from typing import Any

from stepfleet.worker.engine.transport.channel import Channel
from stepfleet.worker.engine.transport.kombu_types import StockTransport
from stepfleet.worker.engine.transport.poller import Poller


class Transport(StockTransport):
    """``redis-batch://``: kombu's Redis transport with batched fetches and acknowledgements."""

    Channel = Channel

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.cycle = Poller()
        self.hub: Any = None

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        """Let a hub poll the connections, and send acknowledgements with its fetches."""
        self.hub = loop
        super().register_with_event_loop(connection, loop)

    def poll_within(self, seconds: float) -> None:
        """Make the hub poll within so many seconds; every second it does so anyway."""
        if seconds < (self.brpop_timeout or 1.0):
            self.hub.call_later(seconds, _nothing)

    def deliver(self, message: dict[str, Any], queue: str) -> None:
        """Deliver a message to the queue's consumer."""
        self._deliver(message, queue)


def _nothing() -> None:
    """Called for the hub's round around it."""


class TlsChannel(Channel):
    """A channel that checks the server's certificate unless the URL says otherwise."""

    def _connparams(self, asynchronous: bool = False) -> dict[str, Any]:
        info = self.connection.client
        info.ssl = info.ssl or {"ssl_cert_reqs": "required"}
        params: dict[str, Any] = super()._connparams(asynchronous)
        return params


class TlsTransport(Transport):
    """``rediss-batch://``: the same over TLS."""

    Channel = TlsChannel
