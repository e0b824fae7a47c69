"""Streamed text, and the feeds of a store: one per shard, pointing to events for broadcasts.

Switched on by workers that broadcast; scripts then add a pointer after each write of events.
An outlet (one webhook, one pub/sub server) has its place in each feed, kept here as well, and
one owner at a time.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stepfleet.orchestrator.events.envelope import Event, channel_of, numbered
from stepfleet.orchestrator.records import exact_json
from stepfleet.orchestrator.store.codec import Fields, load_events, moment, pairs
from stepfleet.orchestrator.store.gateway import Gateway, Opened
from stepfleet.orchestrator.store.keys import PREFIX
from stepfleet.orchestrator.store.lua import run_script

KEPT_SECONDS = 3600
MOST_KEPT = 4000
ON_SECONDS = 7 * 24 * 3600
JOINED_AT_ONCE = 100
"""Runs, and events of theirs, that one script call takes into a feed."""
START = "0-0"
SHARD_SECONDS = 5.0
"""How long `switch_on` waits for a shard."""


class Chunks(Gateway):
    """Writes and reads what runs send before their commits: chunks of text, and starts."""

    async def begin(self, run_id: str, step: int, *, anew: bool = True) -> int:
        """Return the number (from 1) of a new attempt at a step, or of the newest one."""
        key = f"{self._keys.run(run_id)}:chunks:attempts"
        number, _ = await self._connection.execute_all(
            ("HINCRBY", key, step, int(anew)), ("EXPIRE", key, KEPT_SECONDS)
        )
        return max(int(number), 1)

    async def add(self, chunks: Sequence[Event]) -> None:
        """Write chunks of any runs and publish them, in one round trip."""
        commands: list[tuple[Any, ...]] = []
        for chunk in chunks:
            key, text = self._key(chunk.session_id), exact_json.dumps(chunk.to_dict())
            commands += [
                ("XADD", key, "MAXLEN", "~", MOST_KEPT, "*", "chunk", text),
                ("EXPIRE", key, KEPT_SECONDS),
                ("PUBLISH", self._keys.of(channel_of(chunk.session_id)), text),
            ]
        await self._connection.execute_all(*commands)

    async def read(self, run_id: str, after: str = "0") -> tuple[list[dict[str, Any]], str]:
        """Return the chunks after the position `after`, and the position to go on from."""
        entries = await self._connection.execute(
            "XRANGE", self._key(run_id), f"({after}" if after != "0" else "-", "+", "COUNT", 500
        )
        chunks = [exact_json.loads(pairs(fields)["chunk"]) for _, fields in entries]
        return chunks, entries[-1][0] if entries else after

    def _key(self, run_id: str) -> str:
        return f"{self._keys.run(run_id)}:chunks"


@dataclass(frozen=True, slots=True)
class FeedPosition:
    """The position of an outlet in one feed: the last entry's id, and its number from 1."""

    entry: str = START
    number: int = 0

    @classmethod
    def of(cls, stored: str | None) -> "FeedPosition":
        """Parse `stored`; None is the beginning."""
        if not stored:
            return cls()
        entry, _, number = stored.partition(" ")
        return cls(entry, int(number))

    @property
    def stored(self) -> str:
        """The position as it is stored."""
        return f"{self.entry} {self.number}"


@dataclass(frozen=True, slots=True)
class FeedPage:
    """Envelopes of one feed in order, the place after them, and how many writes were missed.

    A write is missed where an outlet stood still until its pointer or the run's
    events are gone.
    """

    shard: int
    envelopes: tuple[dict[str, Any], ...]
    place: FeedPosition
    writes: int
    lost: int = 0


class Feeds(Gateway):
    """Reads the feeds of all shards and keeps the places of outlets."""

    def __init__(self, opened: Opened) -> None:
        super().__init__(opened)
        self._late: set[asyncio.Task[Any]] = set()

    async def switch_on(self) -> None:
        """Add events of active and of new runs to the feeds, for a week unless it is renewed.

        Active runs join page by page; another call continues with the rest. Shards that are away
        for longer than `SHARD_SECONDS` are switched on when they are back.
        """
        tasks = [asyncio.create_task(self._switch_on(shard)) for shard in self._shards]
        for task in tasks:
            self._late.add(task)
            task.add_done_callback(self._finished)
        try:
            done, _ = await asyncio.wait(tasks, timeout=SHARD_SECONDS)
        except asyncio.CancelledError:
            for task in tasks:
                task.cancel()
            raise
        for one in done:
            one.result()

    async def _switch_on(self, shard: int) -> None:
        due = [self._keys.due(shard)]
        more = True
        while more:
            _, more = await run_script(self._connection, "feed", due, ON_SECONDS, JOINED_AT_ONCE)

    def _finished(self, done: asyncio.Task[Any]) -> None:
        self._late.discard(done)
        if not done.cancelled():
            done.exception()  # the connection has logged it

    async def own(
        self,
        outlet: str,
        owner: str,
        seconds: float,
        moved_to: Mapping[int, FeedPosition] | None = None,
        lost: int = 0,
    ) -> dict[int, FeedPosition] | None:
        """Own an outlet for some time and note the places that it has reached, by shard.

        Returns all its places, or None while somebody else owns it.
        """
        moved = [item for shard, at in (moved_to or {}).items() for item in (shard, at.stored)]
        if lost:
            moved += ["lost", lost]
        reply = await run_script(
            self._connection, "courier", self._outlet(outlet), owner, round(seconds * 1000), *moved
        )
        if reply[0] != "owner":
            return None
        stored = pairs(reply[1:])
        return {shard: FeedPosition.of(stored.get(str(shard))) for shard in self._shards}

    async def disown(self, outlet: str, owner: str) -> None:
        """Let others own an outlet at once, if `owner` does."""
        held = self._outlet(outlet)[0]
        if await self._connection.execute("GET", held) == owner:
            await self._connection.execute("DEL", held)

    async def lost(self, outlet: str) -> int:
        """Return how many writes of events an outlet has missed."""
        return int(await self._connection.execute("HGET", self._outlet(outlet)[1], "lost") or 0)

    async def read(self, places: dict[int, FeedPosition], most: int) -> list[FeedPage]:
        """Return the pages after these positions, `most` writes per feed; no empty pages."""
        replies = await self._connection.execute_all(
            *(
                ("XRANGE", self._feed(shard), f"({place.entry}", "+", "COUNT", most)
                for shard, place in places.items()
            )
        )
        found = [
            (shard, place, [(entry, pairs(fields)) for entry, fields in entries])
            for (shard, place), entries in zip(places.items(), replies, strict=True)
            if entries
        ]
        return [await self._page(shard, place, entries) for shard, place, entries in found]

    async def _page(
        self, shard: int, place: FeedPosition, entries: list[tuple[str, Fields]]
    ) -> FeedPage:
        writes = await self._connection.execute_all(
            *(
                ("XRANGE", f"{self._keys.run(fields['run'])}:events", fields["at"], fields["at"])
                for _, fields in entries
            )
        )
        envelopes: list[dict[str, Any]] = []
        for (_, pointer), found in zip(entries, writes, strict=True):
            for entry, raw in found:
                fields = pairs(raw)
                written = moment(entry.partition("-")[0])
                events = load_events(pointer["run"], fields["events"])
                envelopes += numbered(events, int(fields["first"]), written)
        last, fields = entries[-1]
        number = int(fields["n"])
        gone = sum(not found for found in writes)
        # Numbers start anew where Redis lost its data: then nothing is known to be missing.
        skipped = max(number - place.number - len(entries), 0)
        reached = FeedPosition(last, number)
        return FeedPage(shard, tuple(envelopes), reached, len(entries), gone + skipped)

    @property
    def _shards(self) -> range:
        return range(self._keys.shards)

    def _feed(self, shard: int) -> str:
        return f"{self._keys.tag(shard)}feed"

    def _outlet(self, name: str) -> list[str]:
        key = self._keys.of(f"{PREFIX}:{{outlet:{name}}}")
        return [f"{key}:owner", f"{key}:places"]
