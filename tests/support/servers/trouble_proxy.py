"""A TCP proxy in front of a Redis server that cuts, stalls and slows connections at will.

It counts connections and what clients send, so that tests can tell waiting from spinning.
"""

import contextlib
import socket
import threading
from collections.abc import Iterator

from support.servers.redis_servers import deaf, listener

_CHUNK = 1 << 20


class TroubleProxy:
    """Forwards to `target_port` until told otherwise.

    `connections`, `requests` and `forwarded` (bytes) are counts.
    """

    def __init__(self, target_port: int) -> None:
        self._listener = listener()
        self.port = int(self._listener.getsockname()[1])
        self.connections = 0
        self.requests = 0
        self.forwarded = 0
        self._target = ("127.0.0.1", target_port)
        self._flows = threading.Event()
        self._flows.set()
        self._is_cut = False
        self._delay = 0.0
        self._rate: float | None = None
        self._marker, self._stays_cut = b"", False
        self._hit = threading.Event()
        self._closing = threading.Event()
        self._open: set[socket.socket] = set()
        self._mute: set[socket.socket] = set()
        self._guard = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def attempts(self) -> int:
        """How often somebody tried: new connections and requests."""
        return self.connections + self.requests

    def cut(self) -> None:
        """End all connections, and every new one as soon as it is made."""
        with self._guard:
            self._is_cut = True
            found = list(self._open)
        for one in found:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def stall(self) -> None:
        """Keep all connections open and let nothing through."""
        self._flows.clear()

    def lose_reply_to(self, marker: str, *, and_stay_cut: bool = False) -> threading.Event:
        """Forward the next request that holds `marker`, and cut its connection before the reply.

        `and_stay_cut` cuts all others too, until `heal`. The event is set when that has happened.
        """
        self._hit, self._stays_cut = threading.Event(), and_stay_cut
        self._marker = marker.encode()
        return self._hit

    def slow_down(self, seconds: float) -> None:
        """Hold back everything that the server says for so long."""
        self._delay = seconds

    def throttle(self, rate: float) -> None:
        """Let so many bytes per second through, each way of each connection for itself.

        Little is held on the way, so that whoever sends feels it: connect anew behind this call.
        """
        self._rate = rate

    def heal(self) -> None:
        """Forward as if nothing had been."""
        self._is_cut, self._delay, self._rate = False, 0.0, None
        self._flows.set()

    def close(self) -> None:
        self._closing.set()
        self.cut()
        self.heal()
        deaf(self._listener)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.connections += 1
                if self._is_cut:
                    client.close()
                    continue
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), socket.create_connection(self._target) as server, client:
            pair = {client, server}
            with self._guard:
                if self._is_cut:  # since it was accepted
                    return
                self._open |= pair
            back = threading.Thread(target=self._pump, args=(server, client), daemon=True)
            back.start()
            try:
                self._pump(client, server)
                back.join()
            finally:
                with self._guard:
                    self._open -= pair

    def _pump(self, source: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK):
                if source.getpeername() == self._target:
                    self._closing.wait(self._delay)
                    if source in self._mute:
                        break
                else:
                    self.requests += 1
                    if self._marker and self._marker in data:
                        self._marker = b""
                        self._is_cut |= self._stays_cut
                        self._mute.add(other)
                        other.sendall(data)
                        if self._is_cut:
                            self.cut()
                        self._hit.set()
                        continue
                self._flows.wait()
                self._forward(data, other)
        for one in (source, other):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _forward(self, data: bytes, other: socket.socket) -> None:
        self.forwarded += len(data)
        sent = 0
        while sent < len(data):
            rate = self._rate
            part = len(data) if rate is None else max(int(rate / 20), 1)
            other.sendall(data[sent : sent + part])
            sent += part
            if rate is not None:
                self._closing.wait(part / rate)


@contextlib.contextmanager
def troubled(target_port: int) -> Iterator[TroubleProxy]:
    """A proxy before the server on this loopback port, closed afterwards."""
    proxy = TroubleProxy(target_port)
    try:
        yield proxy
    finally:
        proxy.close()
