"""A TCP proxy in front of a Redis server that loses replies at will."""

import contextlib
import select
import socket
import threading
from collections.abc import Iterator

from support.servers.redis_servers import deaf, listener


class BrokerProxy:
    """Forwards every connection; ``lose_reply_to`` cuts the next one that sends the given bytes."""

    def __init__(self, target_port: int) -> None:
        self._listener = listener()
        self.port = int(self._listener.getsockname()[1])
        self.lost = threading.Event()
        self._target = ("127.0.0.1", target_port)
        self._pattern: bytes | None = None
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"redis-batch://127.0.0.1:{self.port}/0"

    def lose_reply_to(self, pattern: bytes) -> None:
        """Let the server answer the next request with these bytes, and the client never know."""
        self._pattern = pattern

    def close(self) -> None:
        deaf(self._listener)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError), socket.create_connection(self._target) as server:
            while True:
                readable, _, _ = select.select([client, server], [], [])
                for source in readable:
                    data = source.recv(1 << 20)
                    if not data:
                        return
                    other = server if source is client else client
                    other.sendall(data)
                    if source is client and self._pattern and self._pattern in data:
                        self._pattern = None
                        server.recv(1 << 20)
                        self.lost.set()
                        return


@contextlib.contextmanager
def proxied(target_port: int) -> Iterator[BrokerProxy]:
    """A proxy before the server on this loopback port, closed afterwards."""
    proxy = BrokerProxy(target_port)
    try:
        yield proxy
    finally:
        proxy.close()
