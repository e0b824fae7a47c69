"""How a channel learns that an empty queue has a message, without holding a blocking pop.

A second connection receives wake-ups: Redis remembers the keys that the fetching connection has
read (CLIENT TRACKING) and notifies the other one of the first change to any of them. So one
connection waits for all queues and priorities at once, and no worker pops a message that it may
not live to register. Must not know messages.
"""

import logging
import ssl
from queue import Empty
from typing import Any

import redis
from redis.exceptions import ResponseError

from stepfleet.worker.engine.transport.ack_buffer import AckBufferChannel

logger = logging.getLogger("kombu.transport.redis")

_POLL_SECONDS = 0.05


class WakingChannel(AckBufferChannel):
    """A channel with wake-ups; where the server refuses them, it polls its queues often instead."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.tracks_keys = True
        self.next_fetch_at = 0.0  # monotonic; until then the queues are known to be empty
        self.woken = False  # since the last fetch was sent
        super().__init__(*args, **kwargs)

    @property
    def poll_seconds(self) -> float:
        """How long the queues need not be polled without a wake-up."""
        return (self.brpop_timeout or 1.0) if self.tracks_keys else _POLL_SECONDS

    @property
    def wakeups(self) -> Any:
        """Client of the connection that receives wake-ups."""
        if "ear" not in self.__dict__:
            self.__dict__["ear"] = redis.Redis(connection_pool=self.async_pool)
        return self.__dict__["ear"]

    def open_wakeups(self) -> None:
        """Subscribe to changes of the keys that fetches have read."""
        connection, fetching = self.wakeups.connection, self.client.connection
        try:
            own_id = send_command(connection, "CLIENT", "ID")
            send_command(connection, "SUBSCRIBE", "__redis__:invalidate")
            send_command(fetching, "CLIENT", "TRACKING", "OFF")
            send_command(fetching, "CLIENT", "TRACKING", "ON", "REDIRECT", own_id, "NOLOOP")
        except ResponseError as error:
            logger.warning(
                "The Redis server does not offer CLIENT TRACKING (%s): idle queues are polled"
                " every %s s instead. Redis 6 or later has it; an ACL user needs +client",
                error,
                _POLL_SECONDS,
            )
            self.tracks_keys = False
        connection._sock.settimeout(0)  # noqa: SLF001 the poller of kombu works on sockets, too

    def close_wakeups(self) -> None:
        """Drop the connection: it belongs to a fetching connection that is gone."""
        held = getattr(self.__dict__.get("ear"), "connection", None)
        if held is not None:
            held.disconnect()

    def on_wakeup(self) -> None:
        """Read a notification, which can only mean that there is something to fetch."""
        connection = self.wakeups.connection
        self.next_fetch_at = 0.0
        self.woken = True
        try:
            if not connection._sock.recv(65_536):  # noqa: SLF001 the content does not matter
                connection.disconnect()
        except (BlockingIOError, ssl.SSLWantReadError):
            pass
        except OSError:
            connection.disconnect()
        raise Empty

    def _poll_error(self, type: str, **options: Any) -> None:  # noqa: A002 kombu's signature
        self.handlers[type](**options)

    def _close_clients(self) -> None:
        super()._close_clients()
        wakeups = self.__dict__.pop("ear", None)
        if wakeups is not None and wakeups.connection is not None:
            connection, wakeups.connection = wakeups.connection, None
            connection.disconnect()


def send_command(connection: Any, *command: Any) -> Any:
    """Send one command over the connection and return its reply."""
    connection.send_command(*command)
    if str(getattr(connection, "protocol", 2)) == "3":
        return connection.read_response(push_request=command[0] == "SUBSCRIBE")
    return connection.read_response()
