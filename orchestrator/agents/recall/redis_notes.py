"""Notes in Redis: one stream that all workers of a fleet share, beside the keys of runs."""

from typing import Any

from redis.asyncio import Redis

from stepfleet.orchestrator.agents.recall.notes import START, NotesPage, OnePerLoop
from stepfleet.orchestrator.redis_client.clients import cluster_client
from stepfleet.orchestrator.redis_client.urls import is_cluster

PAGE = 1000


class RedisNotes:
    """Notes under `name` in the Redis at `url`; the newest `most` of them are kept.

    Belongs to no run and never expires. Connects at its first use in an event loop; nothing is
    sent before.
    """

    def __init__(self, url: str, name: str = "notes", *, most: int = 10_000) -> None:
        self._key = f"sf:notes:{{{name}}}"
        self._generation_key = f"{self._key}:generation"
        self._most = most
        self._clients: OnePerLoop[Any] = OnePerLoop(
            lambda: (cluster_client if is_cluster(url) else Redis.from_url)(
                url, decode_responses=True
            )
        )

    async def append(self, note: str) -> None:
        """Append a note."""
        await self._clients.get().xadd(self._key, {"note": note}, maxlen=self._most)

    async def after(self, place: str) -> NotesPage:
        """Return up to a thousand notes after `place`."""
        generation, _, seen = place.partition(":")
        found, now = await self._read(f"({seen}" if seen else "-")
        cleared = place != START and generation != now
        if cleared:
            found, now = await self._read("-")
        last = found[-1][0] if found else ("" if cleared else seen)
        return NotesPage(tuple(fields["note"] for _, fields in found), f"{now}:{last}", cleared)

    async def clear(self) -> None:
        """Remove all notes."""
        async with self._clients.get().pipeline(transaction=True) as pipe:
            pipe.delete(self._key)
            pipe.incr(self._generation_key)
            await pipe.execute()

    async def aclose(self) -> None:
        """Disconnect in this event loop."""
        await self._clients.close(lambda client: client.aclose())

    async def _read(self, start: str) -> tuple[list[Any], str]:
        async with self._clients.get().pipeline(transaction=True) as pipe:
            pipe.xrange(self._key, min=start, count=PAGE)
            pipe.get(self._generation_key)
            found, generation = await pipe.execute()
        return found, str(generation or 0)
