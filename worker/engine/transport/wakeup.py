"""How a channel learns that an empty queue has a message, without holding a blocking pop.

A second connection hears of changes: Redis remembers the keys that the fetching connection looked
at (CLIENT TRACKING) and tells the other one of the first change to any of them. One connection so
waits for all queues and priorities at once, and nothing is popped by a worker that may die before
it has registered what it popped. Must not know messages.
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
    """A channel with an ear; where the server refuses, it looks at its queues often instead."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.hears = True
        self.next_fetch_at = 0.0  # monotonic time before which the queues are known to be empty
        self.heard = False  # of a change, since the last fetch was sent
        super().__init__(*args, **kwargs)

    @property
    def idle_seconds(self) -> float:
        """How long the queues need not be looked at where nothing was heard."""
        return (self.brpop_timeout or 1.0) if self.hears else _POLL_SECONDS

    @property
    def wakeups(self) -> Any:
        """Holder of the connection that hears."""
        if "ear" not in self.__dict__:
            self.__dict__["ear"] = redis.Redis(connection_pool=self.async_pool)
        return self.__dict__["ear"]

    def open_wakeups(self) -> None:
        """Have the server tell this connection of changes to keys that fetches looked at."""
        connection, fetching = self.wakeups.connection, self.client.connection
        try:
            own_id = ask(connection, "CLIENT", "ID")
            ask(connection, "SUBSCRIBE", "__redis__:invalidate")
            ask(fetching, "CLIENT", "TRACKING", "OFF")
            ask(fetching, "CLIENT", "TRACKING", "ON", "REDIRECT", own_id, "NOLOOP")
        except ResponseError as error:
            logger.warning(
                "The Redis server does not offer CLIENT TRACKING (%s): idle queues are looked at"
                " every %s s instead. Redis 6 or later has it; an ACL user needs +client",
                error,
                _POLL_SECONDS,
            )
            self.hears = False
        connection._sock.settimeout(0)  # noqa: SLF001 the poller of kombu works on sockets, too

    def close_wakeups(self) -> None:
        """Drop the connection: it hears about keys of a fetching connection that is gone."""
        held = getattr(self.__dict__.get("ear"), "connection", None)
        if held is not None:
            held.disconnect()

    def hear(self) -> None:
        """Take in whatever was said, which can only mean that there is something to fetch."""
        connection = self.wakeups.connection
        self.next_fetch_at = 0.0
        self.heard = True
        try:
            if not connection._sock.recv(65_536):  # noqa: SLF001 what is said does not matter
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


def ask(connection: Any, *command: Any) -> Any:
    """Send one command over the connection and return the answer."""
    connection.send_command(*command)
    if str(getattr(connection, "protocol", 2)) == "3":
        return connection.read_response(push_request=command[0] == "SUBSCRIBE")
    return connection.read_response()
