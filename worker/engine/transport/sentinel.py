"""``sentinel-batch://``: the batched transport to the master that Sentinels name.

The URL names the service, ``sentinel-batch://[user:password@]service/db``; the Sentinels themselves
are in the transport options, so that a lost connection has one address and not several. Must not
know messages.
"""

from typing import Any

from redis import Redis
from redis.sentinel import Sentinel

from stepfleet.worker.engine.transport.channel import Channel
from stepfleet.worker.engine.transport.kombu_types import StockSentinelChannel
from stepfleet.worker.engine.transport.transport import Transport


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
