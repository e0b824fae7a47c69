"""Counts the deliveries of one channel until they are acknowledged or restored.

The fetch registers deliveries and the channel sends acknowledgements. Must not know connections.
"""

from typing import Any

from stepfleet.worker.engine.transport.kombu_types import StockQoS, VirtualQoS


class QoS(StockQoS):
    """Prefetch credit of a channel; acknowledgements go through its buffer."""

    def append(self, message: Any, delivery_tag: str) -> None:
        """Count a delivery that the fetch has registered."""
        VirtualQoS.append(self, message, delivery_tag)

    def forget(self, delivery_tag: str) -> None:
        """Stop counting a delivery."""
        VirtualQoS.ack(self, delivery_tag)

    def ack(self, delivery_tag: str) -> None:
        """Acknowledge a delivery, from any thread, also after the channel's end."""
        self.forget(delivery_tag)
        self.channel.acknowledge(delivery_tag)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        """Drop the message, or restore it behind the others."""
        self.forget(delivery_tag)
        if requeue:
            self.channel.restore_later(delivery_tag)
        else:
            self.channel.acknowledge(delivery_tag)

    def restore_by_tag(self, tag: Any, client: Any = None, leftmost: bool = False) -> None:  # noqa: ARG002 kombu's signature
        """Restore one message now (kombu's sweep for the visibility timeout calls this)."""
        self.channel.restore_message(tag, behind=leftmost)

    def restore_unacked(self, client: Any = None) -> None:  # noqa: ARG002 the same
        """Restore every message that is neither acknowledged nor still running."""
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
