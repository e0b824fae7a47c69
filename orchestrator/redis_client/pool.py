"""A pool that can renew its connections, each before its next use.

Closing idle connections at once would break a caller that has just got one.
"""

from typing import Any

from redis.asyncio import BlockingConnectionPool


class RenewablePool(BlockingConnectionPool):
    """A blocking pool; `renew` lets every connection connect again before it is used again.

    `connects` counts how often one did, so that others see that the server may have changed.
    """

    generation = 0
    connects = 0

    def renew(self) -> None:
        """Let all connections connect again: the server behind the address may be another."""
        self.generation += 1

    async def ensure_connection(self, connection: Any) -> None:
        """Connect a connection that the pool hands out, if it is not or is of an old generation."""
        if getattr(connection, "generation", self.generation) != self.generation:
            await connection.disconnect()
        connection.generation = self.generation
        stream = getattr(connection, "_reader", None)
        await super().ensure_connection(connection)
        if getattr(connection, "_reader", None) is not stream:
            self.connects += 1
