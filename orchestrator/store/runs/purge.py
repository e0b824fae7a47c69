"""Removes ended runs before their retention is over: page by page, and from a full Redis too."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from stepfleet.orchestrator.redis_client.connection import Connection
from stepfleet.orchestrator.store import keys as names
from stepfleet.orchestrator.store.batches.batches import Batches
from stepfleet.orchestrator.store.keys import Keys
from stepfleet.orchestrator.store.lua import ScriptCall
from stepfleet.orchestrator.store.pace import Pace
from stepfleet.orchestrator.store.records.codec import milliseconds

PAGE = 500
PATIENCE, LOOK_SECONDS = 2.0, 0.2
"""For how long, and how often, runs are looked at again that owe their end to others."""
_RUN = "run:"


@dataclass(frozen=True, slots=True)
class Purge:
    """Which ended runs are to go: of one batch, of these end states, ended `older_than` s ago."""

    batch_id: str | None = None
    statuses: tuple[str, ...] = ()
    older_than: float = 0.0
    dry_run: bool = False

    @property
    def is_whole_batch(self) -> bool:
        """Whether nothing of the batch is to stay."""
        return bool(self.batch_id) and not (self.statuses or self.older_than or self.dry_run)


class Purging:
    """Purges one store."""

    def __init__(self, connection: Connection, keys: Keys, batches: Batches) -> None:
        self._connection = connection
        self._keys = keys
        self._batches = batches

    async def purge(self, what: Purge) -> AsyncIterator[int]:
        """Remove matching runs, or count them in a dry run; yield their number after each page.

        Those whose end other runs are to learn go when they know it; where no worker tells them
        within two seconds, they stay. Repeating it is harmless. Raises `StoreError` when Redis
        stays out of reach.
        """
        before = milliseconds(await self._connection.now()) - round(what.older_than * 1000)
        statuses = f" {' '.join(what.statuses)} " if what.statuses else " "
        conditions = (statuses, before, what.batch_id or "", "1" if what.dry_run else "")
        done, owing = 0, list[str]()
        pace = Pace(self._connection)
        async for page in self.pages(what.batch_id):
            removed, left = await self._page(page, conditions, pace)
            done, owing = done + removed, owing + left
            yield done
        ends = time.monotonic() + PATIENCE
        while owing and time.monotonic() < ends:
            await asyncio.sleep(LOOK_SECONDS)
            pages = [owing[at : at + PAGE] for at in range(0, len(owing), PAGE)]
            owing = []
            for page in pages:
                removed, left = await self._page(page, conditions, pace)
                done, owing = done + removed, owing + left
            yield done
        if what.is_whole_batch and what.batch_id and not owing:
            await self._forget(what.batch_id)

    async def _page(
        self, page: Sequence[str], conditions: tuple[object, ...], pace: Pace
    ) -> tuple[int, list[str]]:
        """Return how many of these runs were removed, and those that owe their end to others."""
        removed, owing = 0, list[str]()
        for group in pace.groups(page):
            replies = await pace.send([_call(run_key, conditions) for run_key in group])
            removed += sum(reply > 0 for reply in replies)
            owing += [key for key, reply in zip(group, replies, strict=True) if reply < 0]
        return removed, owing

    async def pages(self, batch_id: str | None) -> AsyncIterator[Sequence[str]]:
        """Yield keys of runs that may have ended; other keys among them are no harm."""
        if batch_id is None:
            for server in await self._connection.servers():
                cursor = 0
                while True:
                    match = self._keys.of(f"{names.PREFIX}:{{s*}}:{_RUN}*")
                    cursor, found = await server.scan(cursor, match, PAGE, "HASH")
                    yield [str(key) for key in found]
                    if not int(cursor):
                        break
            return
        places: dict[int, int] = {}
        while ended := await self._batches.ended_after(batch_id, places, PAGE):
            places |= {one.shard: one.place for one in ended}
            yield [self._keys.run(run_id) for one in ended for run_id in one.run_ids]

    async def _forget(self, batch_id: str) -> None:
        """Remove the records of a batch, unless runs of it are open."""
        if await self._batches.open_runs(batch_id):
            return
        for shard in range(self._keys.shards):
            counters = self._keys.batch(shard, batch_id)
            await self._connection.execute("UNLINK", counters, self._keys.ended(shard, batch_id))
        await self._batches.forget(batch_id)


def _call(run_key: str, conditions: tuple[object, ...]) -> ScriptCall:
    tag, _, run_id = run_key.partition(_RUN)
    return ("purge", [run_key, f"{tag}due"], run_id, *conditions)
