"""The circuits of services that are out, for the whole fleet, and the runs that wait for them.

One hash on one slot has the circuits; the runs lie in a set of their own shard, written by the
commit that parks them. Decides nothing about calls (`worker.runtime.circuits` does).
"""

import random

from pydantic import ConfigDict

from stepfleet.orchestrator.protocol.verdict import circuit_id
from stepfleet.orchestrator.records.base import Record
from stepfleet.orchestrator.store.gateway import Gateway
from stepfleet.orchestrator.store.keys import CIRCUITS
from stepfleet.orchestrator.store.lua import run_script

LONGEST_PAUSE = 60.0
"""Seconds between probes, at most."""
KNOWN_SECONDS = 15.0
"""How long a closed circuit is known, until every worker has seen that."""
PAGE = 200
_SHOWN = 200


class Circuit(Record):
    """A service that is out: `state` is open, or closed for a while when it is back.

    `since` and `next` (the next probe) are milliseconds of Redis's clock; `tries` counts probes.
    """

    model_config = ConfigDict(extra="ignore")

    name: str
    reason: str = ""
    state: str = "open"
    since: float = 0
    next: float = 0
    tries: int = 0

    @property
    def is_open(self) -> bool:
        """Whether no calls are made but probes."""
        return self.state == "open"


class ServiceOutage(Record):
    """A service that is out, and for how many runs: they wait in the store, without a slot.

    `since` is a time in seconds since 1970, by Redis's clock. `probes` were made in vain.
    """

    service: str
    reason: str
    since: float
    probes: int
    waiting: int

    def __str__(self) -> str:
        """Return it in words."""
        many = "1 run waits" if self.waiting == 1 else f"{self.waiting} runs wait"
        reason = self.reason if len(self.reason) <= _SHOWN else f"{self.reason[:_SHOWN]}…"
        return f"{self.service} is out: {many} for it and continue by themselves ({reason})"


class Circuits(Gateway):
    """Reads and changes the circuits of a fleet."""

    async def read(self) -> dict[str, Circuit]:
        """Return all circuits by their ids. Raises `StoreError`."""
        found = await self._connection.execute("HGETALL", self._keys.of(CIRCUITS))
        return {one: Circuit.from_json(text) for one, text in found.items()}

    async def outages(self) -> list[ServiceOutage]:
        """Return the services that are out. Raises `StoreError`."""
        found = {of: one for of, one in (await self.read()).items() if one.is_open}
        outages = []
        for of, one in found.items():
            sizes = (("SCARD", key) for key in self._waiting(of))
            waiting = sum(await self._connection.execute_all(*sizes))
            outages.append(
                ServiceOutage(
                    service=one.name,
                    reason=one.reason,
                    since=one.since / 1000,
                    probes=one.tries,
                    waiting=waiting,
                )
            )
        return outages

    async def some_of(self, of: str, most: int) -> list[str]:
        """Return some of the runs that wait for the circuit `of`. Raises `StoreError`."""
        each = -(-most // self._keys.shards)
        reads = (("SRANDMEMBER", key, each) for key in self._waiting(of))
        return [one for some in await self._connection.execute_all(*reads) for one in some]

    def _waiting(self, of: str) -> list[str]:
        """Return the sets of runs that wait for a circuit; `out` is of the version before."""
        tags = map(self._keys.tag, range(self._keys.shards))
        return [f"{tag}{name}:{of}" for tag in tags for name in ("service", "out")]

    async def change(self, verb: str, of: str, *args: object) -> bool:
        """Run a verb of `circuit.lua` on the circuit `of`; return whether it changed something."""
        given = (verb, of, *args)
        key = self._keys.of(CIRCUITS)
        return bool(await run_script(self._connection, "circuit", [key], *given, once=True))

    async def open(self, name: str, reason: str) -> None:
        """Open the circuit of a service, or note that it still fails."""
        first = round(self._settings.rescue_interval * 1000)
        await self.change("open", circuit_id(name), name, reason[:500], first)

    async def probe(self, of: str, jitter: float) -> bool:
        """Return whether the caller is to probe now."""
        return await self.change("probe", of, round(LONGEST_PAUSE * 1000), jitter)

    async def wake(self, of: str, most: int | None = None, *, probes: bool = False) -> int:
        """Make runs due that wait for a service: `most` of any shards, or all; return how many."""
        shards = list(range(self._keys.shards))
        random.shuffle(shards)
        woken = 0
        for shard in shards:
            while most is None or woken < most:
                page = PAGE if most is None else most - woken
                given = (of, page, "probes" if probes else "waits")
                due = [self._keys.due(shard)]
                looked_at, woke = await run_script(self._connection, "wake", due, *given)
                woken += woke
                if looked_at < page:
                    break
        return woken
