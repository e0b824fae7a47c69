"""Counts the deliveries of one channel and says which of them are over.

Registering a delivery is the fetch's work, sending its acknowledgement the channel's: this only
notes it. Must not know connections.
"""

from typing import Any

from stepfleet.worker.engine.transport.kombu_types import StockQoS, VirtualQoS


class QoS(StockQoS):
    """Prefetch credit of a channel; acknowledgements go through the process's ledger."""

    def append(self, message: Any, delivery_tag: str) -> None:
        """Count a delivery that the fetch has registered."""
        VirtualQoS.append(self, message, delivery_tag)

    def forget(self, delivery_tag: str) -> None:
        """Count a delivery no longer."""
        VirtualQoS.ack(self, delivery_tag)

    def ack(self, delivery_tag: str) -> None:
        """Owe an acknowledgement, from any thread, also after the channel's end."""
        self.forget(delivery_tag)
        self.channel.acknowledge(delivery_tag)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        """Drop the message, or give it back behind the others."""
        self.forget(delivery_tag)
        if requeue:
            self.channel.restore_later(delivery_tag)
        else:
            self.channel.acknowledge(delivery_tag)

    def restore_by_tag(self, tag: Any, client: Any = None, leftmost: bool = False) -> None:  # noqa: ARG002 kombu's signature
        """Give one message back now (kombu's sweep for the visibility timeout calls this)."""
        self.channel.restore_message(tag, behind=leftmost)

    def restore_unacked(self, client: Any = None) -> None:  # noqa: ARG002 the same
        """Give everything back that is neither acknowledged nor still running."""
        self._flush()
        tags = list(self._delivered)
        self._delivered.clear()
        self.channel.restore_deliveries(tags)

    def credit(self, most: int) -> int:
        """How many messages may be fetched now, at most ``most``."""
        if not self.can_consume():
            return 0
        free = self.can_consume_max_estimate()
        return most if free is None else min(most, int(free))
