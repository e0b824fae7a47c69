"""Chooses the loopback port of a private server; must not know the server."""

import secrets
import socket

from stepfleet.orchestrator.store.embedded.failure import EmbeddedRedisError

# Above the ports of common services, below the ephemeral ones: a client that tries a dead
# ephemeral port again and again can end up connected to itself.
_LOWEST, _COUNT = 20_000, 12_768
_TRIES = 1_000


def choose_port(wanted: int | None, last: int | None) -> int:
    """Return the wanted port, else the last one where it is free, else any free one.

    Raises EmbeddedRedisError where the wanted port is taken.
    """
    if wanted is not None:
        if not is_free(wanted):
            raise EmbeddedRedisError(
                f"Port {wanted} is taken. Fix: name another port, or none for a free one."
            )
        return wanted
    if last is not None and is_free(last):
        return last
    for _ in range(_TRIES):
        port = _LOWEST + secrets.randbelow(_COUNT)
        if is_free(port):
            return port
    raise EmbeddedRedisError(
        f"No free loopback port was found between {_LOWEST} and {_LOWEST + _COUNT - 1}."
    )


def is_free(port: int) -> bool:
    """Tell whether nothing listens on the loopback port at this moment."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
