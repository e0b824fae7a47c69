"""Fills a Redis with ended runs: a few hundred by a real worker, and copies of these.

A copy has all keys of its pattern with another id, other times, and another batch; packed records
that name the run are unpacked, changed and packed again. It is entered where the pattern
is: in the lists of runs, in the index of what is to be archived, in the counters of its batch. Not
copied: the ledger of model calls, the audit, times within records. Consecutive copies have
different patterns, so that compression finds between neighbours what it finds between real runs.
"""

import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from loads import LONGEST, environment, lines
from memory import AGENTS
from processes import model, until, workers
from redis import Redis

from stepfleet import Fleet
from stepfleet.orchestrator.errors import SerializationError
from stepfleet.orchestrator.records.batch import Manifest
from stepfleet.orchestrator.store.batches.batches import batch_id_of, run_id_of
from stepfleet.orchestrator.store.compression import packed, unpacked
from stepfleet.orchestrator.store.keys import Keys
from stepfleet.orchestrator.store.lua import flat

ROWS = 1_000
"""Rows of a batch."""
PATTERNS = 250
"""Runs that the worker does, with a batch and again without one."""
TOGETHER = 200
"""Copies that are sent to Redis together."""
OLD_MS, SPAN_MS = 3 * 86_400_000, 86_400_000
"""Copies were created three to two days ago."""
PARTS = ("", ":log", ":outcomes", ":lost", ":journal")
TIMES = ("created", "updated", "ended", "execution_started")
Fields = dict[str, str]


@dataclass(frozen=True, slots=True)
class Value:
    """A stored value; where the pattern's id is in it, unpacked, it is written anew."""

    text: str
    named: str = ""
    is_packed: bool = False

    @classmethod
    def of(cls, stored: str, run_id: str, *, may_be_packed: bool) -> "Value":
        """Return a value of a run's hash or event."""
        plain = stored
        if may_be_packed:
            with suppress(SerializationError):
                plain = unpacked(stored).decode()
        if run_id not in plain:
            return cls(stored)
        return cls(stored, plain, is_packed=plain != stored)

    def copied(self, run_id: str, copy_id: str) -> str:
        """Return the value with the copy's id."""
        if not self.named:
            return self.text
        text = self.named.replace(run_id, copy_id)
        return packed(text) if self.is_packed else text


@dataclass(frozen=True, slots=True)
class Pattern:
    """A run of the worker: its hashes by the ends of their keys, and its events with their ids."""

    run_id: str
    hashes: Mapping[str, Mapping[str, Value]]
    events: Sequence[tuple[str, Mapping[str, Value]]]

    @classmethod
    def read(cls, store: Any, keys: Keys, run_id: str) -> "Pattern":
        """Return a run that has ended."""
        key = keys.run(run_id)
        hashes = {part: _values(store.hgetall(key + part), part, run_id) for part in PARTS}
        if hashes[""]["status"].text != "completed":
            raise RuntimeError(f"the run {run_id} is {hashes['']['status'].text}")
        events = [
            (place, _values(one, ":events", run_id)) for place, one in store.xrange(f"{key}:events")
        ]
        return cls(run_id, {part: one for part, one in hashes.items() if one}, events)

    def created(self) -> int:
        """The time of its creation in ms."""
        return int(self.hashes[""]["created"].text)

    def copy(
        self, run_id: str, changes: Fields, shift: int
    ) -> tuple[dict[str, Fields], list[list[str]]]:
        """Return a copy's hashes, and the arguments of XADD for its events but for the key."""
        hashes = {part: self._fields(one, run_id) for part, one in self.hashes.items()}
        header = hashes[""]
        header |= changes | {name: str(int(header[name]) + shift) for name in TIMES}
        events = []
        for place, fields in self.events:
            at, _, number = place.partition("-")
            events.append([f"{int(at) + shift}-{number}", *flat(self._fields(fields, run_id))])
        return hashes, events

    def _fields(self, fields: Mapping[str, Value], run_id: str) -> Fields:
        return {name: one.copied(self.run_id, run_id) for name, one in fields.items()}


def _values(stored: Mapping[str, str], part: str, run_id: str) -> dict[str, Value]:
    known = {"": ("slim", "outcome"), ":events": ("events",)}.get(part, filter(str.isdigit, stored))
    names = set(known)
    return {
        name: Value.of(one, run_id, may_be_packed=name in names) for name, one in stored.items()
    }


@dataclass(frozen=True)
class Patterns:
    """What a worker did: runs of a batch, runs without one, and what a run adds to its batch."""

    batched: Sequence[Pattern]
    single: Sequence[Pattern]
    counts: Mapping[str, int]


@dataclass(frozen=True)
class Ended:
    """The runs that a Redis has: without a batch, the oldest first, and the ids of batches."""

    single: Sequence[str]
    batches: Sequence[str]


def play(url: str, agent: str, steps: int, archive_url: str) -> Patterns:
    """Do the patterns by a real worker, whose ended runs are kept for an archive."""
    store: Any = Redis.from_url(url, decode_responses=True)
    with model("0", stub=True) as served, Fleet(url) as client, store:
        variables = {**environment(url, served.url, 200), "STEPFLEET_ARCHIVE_URL": archive_url}
        with workers(1, variables):
            batch = client.submit_batch(lines(PATTERNS, steps), agent=AGENTS[agent])
            texts = [one["input"] for one in lines(PATTERNS, steps)]
            singles = [client.submit(agent=AGENTS[agent], input=text) for text in texts]
            until(lambda: batch.progress().done == PATTERNS, within=LONGEST)
            until(lambda: not client.overview().active, within=LONGEST)
        keys = Keys(int(store.get("sf:shards")))
        counters = Counter[str]()
        for shard in range(keys.shards):
            found = store.hgetall(keys.batch(shard, batch.id))
            counters.update({name: int(one) for name, one in found.items()})
        return Patterns(
            [Pattern.read(store, keys, run_id) for run_id in batch.run_ids()],
            [Pattern.read(store, keys, run_id) for run_id in singles],
            {name: total // PATTERNS for name, total in counters.items()},
        )


def fill(url: str, patterns: Patterns, runs: int, batches: int) -> Ended:
    """Write copies: `batches` of `ROWS` rows each, and single runs up to `runs` in all."""
    store: Any = Redis.from_url(url, decode_responses=True)
    with store:
        keys = Keys(int(store.get("sf:shards")))
        filling = _Filling(store, keys, patterns, runs)
        singles = runs - batches * ROWS
        every = max(1, singles // max(batches, 1))
        single, made = list[str](), list[str]()
        for number in range(singles):
            single.append(filling.add_single())
            if number % every == 0 and len(made) < batches:
                made.append(filling.add_batch(len(made)))
        while len(made) < batches:
            made.append(filling.add_batch(len(made)))
        filling.send()
        return Ended(single, made)


class _Filling:
    """Writes copies, those of a time together."""

    def __init__(self, store: Any, keys: Keys, patterns: Patterns, runs: int) -> None:
        self._store, self._keys, self._patterns = store, keys, patterns
        self._began, self._runs, self._made = round(time.time() * 1000) - OLD_MS, runs, 0
        self._random = random.Random(self._began)  # noqa: S311 - ids, not secrets
        self._calls = store.pipeline(transaction=False)

    def send(self) -> None:
        """Send what is left."""
        self._calls.execute()

    def add_single(self) -> str:
        """Add a run without a batch; return its id."""
        run_id = str(UUID(bytes=self._random.randbytes(16), version=4))
        ended = self._add(run_id, self._patterns.single, {})
        self._calls.zadd(self._keys.aging(self._keys.shard_of(run_id)), {run_id: ended})
        return run_id

    def add_batch(self, number: int) -> str:
        """Add a batch of `ROWS` runs; return its id."""
        batch_id, keys = batch_id_of(f"copies:{self._began}:{number}"), self._keys
        places, created = Counter[int](), self._now()
        for row in range(ROWS):
            run_id = run_id_of(batch_id, row)
            changes = {"batch": batch_id, "row": str(row), "line": f"{self._began}-{number}-{row}"}
            self._add(run_id, self._patterns.batched, changes)
            shard = keys.shard_of(run_id)
            places[shard] += 1
            self._calls.zadd(keys.ended(shard, batch_id), {run_id: places[shard]})
        for shard, count in places.items():
            counters = {name: one * count for name, one in self._patterns.counts.items()}
            self._calls.hset(keys.batch(shard, batch_id), mapping=counters)
        self._calls.hset(keys.manifest(batch_id), mapping=_manifest(batch_id, created))
        self._calls.zadd("sf:batches", {batch_id: created})
        return batch_id

    def _now(self) -> int:
        return self._began + self._made * SPAN_MS // self._runs

    def _add(self, run_id: str, patterns: Sequence[Pattern], changes: Fields) -> int:
        """Add a run; return when it ended, in ms."""
        pattern = patterns[self._made % len(patterns)]
        hashes, events = pattern.copy(run_id, changes, self._now() - pattern.created())
        key, call = self._keys.run(run_id), self._calls.execute_command
        for part, fields in hashes.items():
            call("HSET", f"{key}{part}", *flat(fields))
        # As the script that ends a run does it: a stream's last node has room for more entries.
        for one in events:
            call("XADD", f"{key}:spare", *one)
        call("COPY", f"{key}:spare", f"{key}:events")
        call("UNLINK", f"{key}:spare")
        header, tag = hashes[""], self._keys.tag(self._keys.shard_of(run_id))
        listed = header.get("stop_reason") or header["status"]
        call("ZADD", f"{tag}runs:{listed}", header["created"], run_id)
        self._made += 1
        if self._made % TOGETHER == 0:
            self._calls.execute()
        return int(header["ended"])


def _manifest(batch_id: str, created: int) -> Fields:
    made = Manifest(
        batch_id=batch_id,
        key=f"content:{batch_id}",
        digest=batch_id,
        name=f"copies {batch_id}",
        agent="runner",
        created=datetime.fromtimestamp(created / 1000, UTC),
        total=ROWS,
        rows=ROWS,
    )
    return {**made.to_fields(), "created": str(created), "sealed": "1"}


def kinds_of(store: Any, keys: Keys, run_ids: Sequence[str]) -> dict[str, float]:
    """Return bytes per run of each kind of its keys, by MEMORY USAGE."""
    found: dict[str, float] = {}
    for part in (*PARTS[:4], ":events"):
        taken = [
            int(store.memory_usage(f"{keys.run(one)}{part}", samples=0) or 0) for one in run_ids
        ]
        found[part.removeprefix(":") or "header"] = sum(taken) / len(taken)
    return found


def others(store: Any) -> Iterator[tuple[str, int]]:
    """Yield the kinds of keys that are no run's, with the bytes of each key."""
    for key in store.scan_iter("*", count=1000):
        if ":run:" in key:
            continue
        kind = "other"
        for name in ("archived:", ":batch:", ":runs:", "{archive}", "aging", "manifest", "costs"):
            kind = name.strip(":{}") if name in key else kind
        yield kind, int(store.memory_usage(key, samples=0) or 0)
