"""What becomes of a batch that has ended: its runs expire, and batches that follow it begin.

Decides when a batch is over, on all shards, and when it has begun anew. A pass may be interrupted
anywhere: the next one continues.
"""

import asyncio
import logging
from collections.abc import Sequence

import orjson

from stepfleet.orchestrator.errors import StoreError
from stepfleet.orchestrator.records.batch import Manifest, summed
from stepfleet.orchestrator.store import keys
from stepfleet.orchestrator.store.batches.batches import Batches, batch_id_of
from stepfleet.orchestrator.store.batches.requests import BatchRequests
from stepfleet.orchestrator.store.codec import milliseconds
from stepfleet.orchestrator.store.gateway import Gateway, Opened, TurnGateway
from stepfleet.orchestrator.store.pace import SweepPace

MOST_AT_ONCE = 50
LOOK_SECONDS = 5.0
"""How often one worker of a fleet looks."""
NEXT_LOOK_MS = 60_000
log = logging.getLogger(__name__)
LATER_MS = 60_000
"""When one is looked at that nobody has called: its call was lost."""
TURN_MS = 5_000
"""How long a worker that is silent keeps others from submitting."""
MOST_FOLLOWING = 20


def follow_up_id(batch_id: str, digest: str, level: int = 0) -> str:
    """Return the id of the batch that does the same with the same batch's results."""
    return batch_id_of(f"then:{batch_id}:{digest}" + (f":{level}" if level else ""))


class FollowUpIndex(TurnGateway):
    """Reads and writes which batches follow others."""

    def __init__(self, opened: Opened, batches: Batches) -> None:
        super().__init__(opened, TURN_MS, lambda one: f"{opened.keys.manifest(one)}:turn")
        self._index = opened.keys.of(keys.FOLLOW_UPS)
        self._batches = batches

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
        limits = ("LIMIT", 0, MOST_FOLLOWING)
        found, size = await self._connection.execute_all(
            ("ZRANGEBYSCORE", self._index, "-inf", await self._now(), *limits),
            ("ZCARD", self._index),
        )
        return list(found), int(size) > 0

    async def put_off(self, batch_id: str) -> None:
        """Have nobody look for a while, unless it is called: for a caller that looks now."""
        later = await self._now() + LATER_MS
        await self._connection.execute("ZADD", self._index, "XX", later, batch_id)

    async def hold(self, name: str) -> bool:
        """Keep the turn while submitting; soon after the end of the last one others look.

        Returns false where it is another's by now.
        """
        till = await self._now() + TURN_MS
        held = await super().hold(name)
        await self._connection.execute("ZADD", self._index, "XX", till, name)
        return held

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

    async def _now(self) -> int:
        return milliseconds(await self._batches.now())


class BatchUpkeep(Gateway):
    """Looks after batches as wholes."""

    def __init__(
        self, opened: Opened, batches: Batches, follow_ups: FollowUpIndex, requests: BatchRequests
    ) -> None:
        super().__init__(opened)
        self._batches, self._follow_ups, self._requests = batches, follow_ups, requests
        self._shards = range(opened.keys.shards)
        self._upkeep = opened.keys.of(keys.UPKEEP)
        self._retention_ms = opened.settings.retention * 1000

    async def look(self, pause: float = LOOK_SECONDS) -> int:
        """Settle batches that may be over, unless another worker just did; return how many.

        The next look is due after `pause` seconds.

        At the same time finishes the requests to batches whose clients are gone. Neither waits for
        the other, or fails with it. Raises `StoreError` when Redis stays out of reach.
        """
        turn = ("SET", self._upkeep, "1", "NX", "PX", round(pause * 1000))
        if not await self._connection.execute(*turn):
            return 0
        settled, finished = await asyncio.gather(
            self.settle_all(), self._requests.go_on(), return_exceptions=True
        )
        if isinstance(finished, BaseException):
            raise finished
        if isinstance(settled, BaseException):
            raise settled
        return settled

    async def settle_all(self) -> int:
        """Settle the batches that are due; return how many they were.

        A batch that cannot be settled is logged and put off. Raises as `look`.
        """
        limits = ("LIMIT", 0, MOST_AT_ONCE)
        now = await self._now()
        found = await self._connection.execute_all(
            *(
                ("ZRANGEBYSCORE", self._keys.over(shard), "-inf", now, *limits)
                for shard in self._shards
            )
        )
        batch_ids = sorted({batch_id for some in found for batch_id in some})
        for batch_id in batch_ids:
            try:
                await self.settle(batch_id)
            except StoreError:
                raise
            except Exception:
                log.exception("batch %s cannot be settled", batch_id)
                await self._look_later(batch_id)
        return len(batch_ids)

    async def settle(self, batch_id: str) -> None:
        """Have the runs of a batch expire if all have ended, or stay if they have not."""
        await self._look_later(batch_id)  # first: an end that comes from here on is newer
        seen = await self._scores(batch_id)
        manifest = await self._batches.find(batch_id)
        if await self._batches.is_over(batch_id, manifest):
            if manifest and manifest.next:
                await self._follow_ups.call(manifest.next)
            await self._expire(batch_id, manifest, seen)
            # A run may have been retried meanwhile.
            if await self._batches.is_over(batch_id, manifest):
                return
        await self.keep(batch_id)

    async def keep(self, batch_id: str) -> None:
        """Have the records of a batch stay, where they were to expire."""
        if await self._expires(batch_id):
            await self._sweep(batch_id, "")
            await self._connection.execute(
                "HDEL", self._keys.manifest(batch_id), "final", "expires"
            )

    async def _look_later(self, batch_id: str) -> None:
        later = await self._now() + NEXT_LOOK_MS
        await self._connection.execute_all(
            *(("ZADD", self._keys.over(shard), "XX", later, batch_id) for shard in self._shards)
        )

    async def _scores(self, batch_id: str) -> list[str]:
        """Return the batch's score in each shard's index of due batches, or ''."""
        found = await self._connection.execute_all(
            *(("ZSCORE", self._keys.over(shard), batch_id) for shard in self._shards)
        )
        return ["" if score is None else str(score) for score in found]

    async def _expire(self, batch_id: str, manifest: Manifest | None, seen: Sequence[str]) -> None:
        if not self._settings.lifetime:
            archive = self._keys.of(keys.ARCHIVE_BATCHES)
            await self._connection.execute("ZADD", archive, await self._now(), batch_id)
            await self._sweep(batch_id, "archive", seen)
            return
        till = await self._now() + self._retention_ms
        if manifest:
            final = orjson.dumps(summed(await self._batches.counters(batch_id))).decode()
            fields = ("final", final, "expires", till)
            await self._connection.execute("HSET", self._keys.manifest(batch_id), *fields)
        await self._sweep(batch_id, str(till), seen)

    async def _expires(self, batch_id: str) -> bool:
        left = await self._connection.execute_all(
            *(("PTTL", self._keys.ended(shard, batch_id)) for shard in self._shards)
        )
        return any(int(one) > 0 for one in left)

    async def _sweep(self, batch_id: str, till: str, seen: Sequence[str] = ()) -> None:
        scores, pace = seen or [""] * len(self._shards), SweepPace(self._connection)
        for shard, score in zip(self._shards, scores, strict=True):
            due, place = [self._keys.due(shard)], "0"
            while place:
                given = (batch_id, till, place, pace.size, score)
                [place] = await pace.send([("expire", due, *given)], pace.size)

    async def _now(self) -> int:
        # Read anew: the times that scripts have just written must not be ahead of it.
        return milliseconds(await self._connection.read_clock())
