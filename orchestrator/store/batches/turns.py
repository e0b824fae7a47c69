"""Whose turn it is to look after a batch or a schedule: one worker's, for a few seconds.

A worker that is silent for so long has lost its turn, and what it writes as the owner is refused.
"""

import os
import secrets
import socket

from stepfleet.orchestrator.redis_client.connection import Connection
from stepfleet.orchestrator.store.lua import run_script


class Turns:
    """Takes turns that last `milliseconds`, as one owner."""

    def __init__(self, connection: Connection, milliseconds: int) -> None:
        self._connection = connection
        self._milliseconds = milliseconds
        self.token = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(6)}"

    async def take(self, key: str) -> bool:
        """Return whether it is the caller's turn from now on."""
        return await self._run("take", key)

    async def hold(self, key: str) -> bool:
        """Keep the turn for a while more; return false where it is another's by now."""
        return await self._run("hold", key)

    async def release(self, key: str) -> None:
        """Give the turn back, unless it is another's."""
        await self._run("release", key)

    async def _run(self, word: str, key: str) -> bool:
        given = (word, self.token, self._milliseconds)
        return bool(await run_script(self._connection, "turn_of", [key], *given))
