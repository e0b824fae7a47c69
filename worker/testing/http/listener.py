"""Opens the server's port and starts serving on a running loop. Knows nothing of models."""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web

# Below the ephemeral ports: there a client that retries a dead port can connect to itself.
_LOWEST, _COUNT = 20_000, 12_000
_TRIES = 200
_BACKLOG = 4096
_KEEP_ALIVE = 3600.0
_CLOSING_SECONDS = 0.2

Serve = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

_silent = logging.getLogger("stepfleet.worker.testing.http")


@dataclass(frozen=True, slots=True)
class Listener:
    """An open port that answers HTTP until it is closed."""

    server: web.Server
    sockets: asyncio.Server
    port: int

    async def close(self) -> None:
        """Stop listening and end every connection, open requests included."""
        self.sockets.close()
        await self.server.shutdown(_CLOSING_SECONDS)


async def listen(serve: Serve, host: str, port: int | None) -> Listener:
    """Serve on `port`, or on a free one from 20000 to 31999 where it is None.

    Raises `OSError` that names the port where it is taken.
    """
    loop = asyncio.get_running_loop()
    server = web.Server(
        serve,
        handler_cancellation=True,
        access_log=None,
        keepalive_timeout=_KEEP_ALIVE,
        logger=_silent,
    )
    wanted = [port] if port is not None else _free_ports()
    refused: OSError | None = None
    for number in wanted:
        try:
            sockets = await loop.create_server(server, host, number, backlog=_BACKLOG)
        except OSError as error:
            refused = error
            continue
        return Listener(server, sockets, number)
    named = port if port is not None else f"any of {_TRIES} from {_LOWEST}"
    raise OSError(f"the model server cannot listen on {host} port {named}: {refused}")


def _free_ports() -> list[int]:
    return [_LOWEST + secrets.randbelow(_COUNT) for _ in range(_TRIES)]
