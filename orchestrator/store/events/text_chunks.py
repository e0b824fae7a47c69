"""The text of model calls while it is written: a short stream per run, and a pub/sub channel.

For display alone: nothing depends on it, nothing is fenced, and it expires after an hour. Each
attempt at a step has a number, which distinguishes a repetition from the attempt before.
"""

from collections.abc import Sequence
from typing import Any

import orjson

from stepfleet.orchestrator.events.envelope import Event, channel_of
from stepfleet.orchestrator.redis_client.connection import Connection
from stepfleet.orchestrator.store.keys import Keys
from stepfleet.orchestrator.store.records.codec import pairs

KEPT_SECONDS = 3600
MOST_KEPT = 4000


class Chunks:
    """Writes and reads the chunks of runs."""

    def __init__(self, connection: Connection, keys: Keys) -> None:
        self._connection = connection
        self._keys = keys

    async def begin(self, run_id: str, step: int) -> int:
        """Return the number (from 1) of a new attempt at streaming a step's text."""
        key = f"{self._keys.run(run_id)}:chunks:attempts"
        number, _ = await self._connection.execute_all(
            ("HINCRBY", key, step, 1), ("EXPIRE", key, KEPT_SECONDS)
        )
        return int(number)

    async def add(self, chunks: Sequence[Event]) -> None:
        """Write chunks of any runs and publish them, in one round trip."""
        commands: list[tuple[Any, ...]] = []
        for chunk in chunks:
            key, text = self._key(chunk.session_id), orjson.dumps(chunk.to_dict())
            commands += [
                ("XADD", key, "MAXLEN", "~", MOST_KEPT, "*", "chunk", text),
                ("EXPIRE", key, KEPT_SECONDS),
                ("PUBLISH", channel_of(chunk.session_id), text),
            ]
        await self._connection.execute_all(*commands)

    async def read(self, run_id: str, after: str = "0") -> tuple[list[dict[str, Any]], str]:
        """Return the chunks behind the position `after`, and the position to go on from."""
        entries = await self._connection.execute(
            "XRANGE", self._key(run_id), f"({after}" if after != "0" else "-", "+", "COUNT", 500
        )
        chunks = [orjson.loads(pairs(fields)["chunk"]) for _, fields in entries]
        return chunks, entries[-1][0] if entries else after

    def _key(self, run_id: str) -> str:
        return f"{self._keys.run(run_id)}:chunks"
