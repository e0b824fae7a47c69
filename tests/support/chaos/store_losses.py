"""Makes a Redis lose what it had acknowledged: a cut append-only file, a stale replica promoted.

Loses no more than `appendfsync everysec` may lose: what was written in the last second before the
server's end, and whatever a replica had not yet received. Knows nothing of what is stored.
"""

import contextlib
import os
import random
import select
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import redis
from support.deadlines import wait_until
from support.servers.redis_servers import RedisServer, deaf, listener

WINDOW = 1.0
"""Seconds of acknowledged writes that a loss may take."""


def newest_tail(folder: Path) -> Path:
    """Return the part of the append-only file that a server in `folder` appends to."""
    parts = (folder / "appendonlydir").glob("*.incr.aof")
    return max(parts, key=lambda part: int(part.name.split(".")[-3]))


class TailCutter:
    """Ends a server by SIGKILL and cuts its append-only file at a random byte."""

    def __init__(self, server: RedisServer, draw: random.Random) -> None:
        self.lost_bytes: list[int] = []
        self._server = server
        self._draw = draw

    def strike(self) -> None:
        """Cut off part of what the last second wrote; every second time repair by the tool."""
        tail = newest_tail(self._server.folder)
        kept = tail.stat().st_size
        time.sleep(self._draw.uniform(0.3, WINDOW))  # what is written meanwhile is at stake
        self._server.kill()
        end = tail.stat().st_size
        at = self._draw.randint(kept, end)
        os.truncate(tail, at)
        self.lost_bytes.append(end - at)
        if len(self.lost_bytes) % 2 == 0:
            _repair(tail)
        self._server.start()


def _repair(part: Path) -> None:
    binary = shutil.which("redis-check-aof") or shutil.which("valkey-check-aof")
    assert binary, "the tests need redis-check-aof on PATH (apt-get install redis-server)"
    done = subprocess.run(
        [binary, "--fix", str(part)], input=b"y\n", capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:]


class Link:
    """A TCP proxy between a master and its replica that can hold back what the master says."""

    def __init__(self, target_port: int) -> None:
        self._listener = listener()
        self.port = int(self._listener.getsockname()[1])
        self._target = ("127.0.0.1", target_port)
        self._held = threading.Event()
        self._closed = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def hold(self) -> None:
        """Forward nothing more; what arrives from here on is lost with `close`."""
        self._held.set()

    def close(self) -> None:
        """Drop all connections, with what is in them."""
        self._held.set()
        self._closed.set()
        deaf(self._listener)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                replica, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(replica,), daemon=True).start()

    def _serve(self, replica: socket.socket) -> None:
        with (
            replica,
            contextlib.suppress(OSError),
            socket.create_connection(self._target) as master,
        ):
            while not self._held.is_set():
                readable, _, _ = select.select([replica, master], [], [], 0.05)
                for source in readable:
                    data = source.recv(1 << 20)
                    if not data:
                        return
                    if not self._held.is_set():
                        (master if source is replica else replica).sendall(data)
            self._closed.wait()  # both ends stay connected, as behind a stalled network


class StalePromoter:
    """Keeps a replica of a server; ends the server and puts the replica, behind, on its address.

    `make` starts a server with settings of its own.
    """

    def __init__(
        self, server: RedisServer, make: Callable[..., RedisServer], draw: random.Random
    ) -> None:
        self.lost_bytes: list[int] = []
        self._server = server
        self._make = make
        self._draw = draw
        self._attach()

    def strike(self) -> None:
        """Let the replica fall behind for up to a second, then promote it."""
        self._link.hold()
        with redis.Redis.from_url(self._replica.url) as client:
            had = int(client.info("replication")["slave_repl_offset"])
        time.sleep(self._draw.uniform(0.3, WINDOW))  # what is written meanwhile is at stake
        with redis.Redis.from_url(self._server.url) as client:
            self.lost_bytes.append(int(client.info("replication")["master_repl_offset"]) - had)
        port = self._server.port
        self._server.kill()
        self._link.close()
        self._replica.promote(port)
        self._server = self._replica
        self._attach()

    def _attach(self) -> None:
        self._link = Link(self._server.port)
        self._replica = self._make(
            replicaof=f"127.0.0.1 {self._link.port}", **{"repl-diskless-sync-delay": "0"}
        )
        wait_until(self._is_in_step, within=60, what="a replica in step")

    def _is_in_step(self) -> bool:
        with redis.Redis.from_url(self._replica.url) as client:
            told = client.info("replication")
        return bool(told["role"] == "slave" and told["master_link_status"] == "up")
