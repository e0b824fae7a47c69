"""The transports by name: with and without TLS, and behind Sentinels.

Decides which channel and poller a connection gets. Must not know messages.
"""

from typing import Any

from redis import Redis
from redis.sentinel import Sentinel

from stepfleet.worker.engine.transport.channel import Channel
from stepfleet.worker.engine.transport.kombu_types import StockSentinelChannel, StockTransport
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
        """Make the hub poll within `seconds`; every second it does so anyway."""
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


class SentinelChannel(Channel, StockSentinelChannel):
    """A channel whose connections ask the Sentinels for the master, each time they connect."""

    #: Transport options: pairs of host and port.
    sentinels: list[tuple[str, int]] = []  # noqa: RUF012 kombu sets it on the instance

    from_transport_options = (
        *Channel.from_transport_options,
        "master_name",
        "sentinels",
        "min_other_sentinels",
        "sentinel_kwargs",
        "sentinel_fanout_compat",
    )

    def _sentinel_managed_pool(self, asynchronous: bool = False) -> Any:
        options = self._connparams(asynchronous)
        del options["host"], options["port"]  # those of the service's name
        manager: Any = Sentinel(  # type: ignore[no-untyped-call]
            self.sentinels,
            min_other_sentinels=getattr(self, "min_other_sentinels", 0),
            sentinel_kwargs=getattr(self, "sentinel_kwargs", None),
            **options,
        )
        # kombu closes them together with the pools
        if asynchronous:
            self._async_sentinel_manager = manager
        else:
            self._sentinel_manager = manager
        return manager.master_for(self.master_name, Redis).connection_pool


class SentinelTransport(Transport):
    """``sentinel-batch://``: batched fetches and acknowledgements, behind Sentinels."""

    Channel = SentinelChannel
    default_port = 26379
