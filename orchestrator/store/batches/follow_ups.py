"""Batches that begin when another one has ended: which of them wait, and who submits one.

The index has each one until its runs are created, so what a dead worker has begun is found again.
"""

from collections.abc import Sequence

from stepfleet.orchestrator.records.batch import Manifest
from stepfleet.orchestrator.store import keys
from stepfleet.orchestrator.store.batches.batches import Batches, batch_id_of
from stepfleet.orchestrator.store.batches.turns import Turns
from stepfleet.orchestrator.store.gateway import Gateway, Opened
from stepfleet.orchestrator.store.records.codec import milliseconds

LATER_MS = 60_000
"""When one is looked at that nobody has called: its call was lost."""
TURN_MS = 5_000
"""How long a worker that is silent keeps others from submitting."""
MOST_AT_ONCE = 20


def follow_up_id(batch_id: str, digest: str, level: int = 0) -> str:
    """Return the id of the batch that does the same with the same batch's results."""
    return batch_id_of(f"then:{batch_id}:{digest}" + (f":{level}" if level else ""))


class FollowUpIndex(Gateway):
    """Reads and writes which batches follow others."""

    def __init__(self, opened: Opened, batches: Batches) -> None:
        super().__init__(opened)
        self._index = opened.keys.of(keys.FOLLOW_UPS)
        self._batches = batches
        self._turns = Turns(opened.connection, TURN_MS)

    async def register(self, manifest: Manifest) -> None:
        """Store a batch that follows another one; workers look at both soon, also once more."""
        batch_id, execute = manifest.batch_id, self._connection.execute
        await execute("ZADD", self._index, await self._now() + LATER_MS, batch_id)
        await self._batches.register(manifest)
        await self.link(manifest.follows or "", batch_id)
        await execute("HDEL", self._keys.manifest(batch_id), "refused", "sealed")
        await self.wake(batch_id)  # a worker that looked before the manifest was there forgot it

    async def wake(self, batch_id: str) -> None:
        """Have workers look at a batch that waits, also where they have forgotten it."""
        await self._connection.execute("ZADD", self._index, 0, batch_id)

    async def link(self, batch_id: str, following: str) -> None:
        """Note with a batch which one follows it."""
        key = self._keys.manifest(batch_id)
        await self._connection.execute("HSET", key, f"next:{following}", "1")

    async def call(self, batch_ids: Sequence[str]) -> None:
        """Have workers look at those of these batches that wait."""
        for batch_id in batch_ids:
            await self._connection.execute("ZADD", self._index, "XX", 0, batch_id)

    async def due(self) -> tuple[list[str], bool]:
        """Return batches to be looked at now, and whether any are in the index."""
        limits = ("LIMIT", 0, MOST_AT_ONCE)
        found, size = await self._connection.execute_all(
            ("ZRANGEBYSCORE", self._index, "-inf", await self._now(), *limits),
            ("ZCARD", self._index),
        )
        return list(found), int(size) > 0

    async def take(self, batch_id: str) -> bool:
        """Return whether it is the caller's to look at."""
        return await self._turns.take(self._turn(batch_id))

    async def put_off(self, batch_id: str) -> None:
        """Have nobody look for a while, unless it is called: for a caller that looks now."""
        later = await self._now() + LATER_MS
        await self._connection.execute("ZADD", self._index, "XX", later, batch_id)

    async def hold(self, batch_id: str) -> bool:
        """Keep the turn while submitting; soon after the end of the last one others look.

        Returns false where it is another's by now.
        """
        till = await self._now() + TURN_MS
        held = await self._turns.hold(self._turn(batch_id))
        await self._connection.execute("ZADD", self._index, "XX", till, batch_id)
        return held

    async def release(self, batch_id: str) -> None:
        """Give the turn back, unless it is another's."""
        await self._turns.release(self._turn(batch_id))

    async def begin(self, batch_id: str, rows: int, total: int, left_out: int) -> None:
        """Note how many rows and runs a batch has, and how many runs before it have no result."""
        key = self._keys.manifest(batch_id)
        counts = ("rows", rows, "total", total, "left_out", left_out)
        await self._connection.execute("HSET", key, *counts)

    async def passed(self, batch_id: str, level_id: str, level: int) -> None:
        """Note that a batch now follows the one in between which has just been submitted."""
        key = self._keys.manifest(batch_id)
        await self._connection.execute("HSET", key, "follows", level_id, "level", level)

    async def refuse(self, batch_id: str, why: str) -> None:
        """End a batch without any run."""
        key = self._keys.manifest(batch_id)
        await self._connection.execute("HSET", key, "refused", why)
        await self._batches.seal(batch_id)
        await self.done(batch_id)

    async def done(self, batch_id: str) -> None:
        """Forget that a batch waits."""
        await self._connection.execute("ZREM", self._index, batch_id)

    def _turn(self, batch_id: str) -> str:
        return f"{self._keys.manifest(batch_id)}:turn"

    async def _now(self) -> int:
        return milliseconds(await self._batches.now())
