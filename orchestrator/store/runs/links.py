"""Links between runs: who waits for a run's end, and which runs a request to it is to reach.

A run that has ended, or is paused, stays in `due` while it owes something; what is done twice
changes nothing.
"""

from dataclasses import dataclass

from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.protocol.claim import Want, Work
from stepfleet.orchestrator.protocol.waiting import waits_in
from stepfleet.orchestrator.records.calls.answers import Awaited
from stepfleet.orchestrator.records.state import Lifecycle
from stepfleet.orchestrator.redis_client.connection import Connection
from stepfleet.orchestrator.store.keys import Keys
from stepfleet.orchestrator.store.lua import RunScripts
from stepfleet.orchestrator.store.records.codec import milliseconds
from stepfleet.orchestrator.store.runs.reading import unknown_run
from stepfleet.orchestrator.store.runs.submission import address_of, call_at

PAGE = 200
"""Calls that are answered at once."""


@dataclass(frozen=True, slots=True)
class Owed:
    """What a run owes: its end to `calls`, a page of them, and `request` to `runs` it started.

    `seen` is the number of its events by then: behind another one it owes anew.
    """

    calls: tuple[Work, ...] = ()
    request: Want | None = None
    runs: tuple[str, ...] = ()
    seen: int = 0


class Links:
    """Reads and writes the links of runs."""

    def __init__(self, connection: Connection, keys: Keys) -> None:
        self._connection = connection
        self._keys = keys
        self._scripts = RunScripts(connection, keys)

    async def follow(self, run_id: str, call: Work) -> Lifecycle | None:
        """Have the end of a run answered to `call`; return its status where it has ended already.

        Raises `NotFoundError` if there is no run of that id, or too many follow it.
        """
        reply = await self._scripts.run("follow", run_id, address_of(call))
        if reply[0] == "unknown":
            raise unknown_run(run_id)
        if reply[0] == "full":
            msg = f"run {run_id!r} has 100,000 followers; let a run follow it that others follow"
            raise ConfigurationError(msg)
        return Lifecycle(reply[1]) if reply[0] == "ended" else None

    async def owed(self, run_id: str) -> Owed:
        """Return what a run owes to others now."""
        key = self._keys.run(run_id)
        header, addresses = await self._connection.execute_all(
            ("HMGET", key, "status", "returns", "reach", "orphans", "waiting", "step", "seq"),
            ("SRANDMEMBER", f"{key}:returns", PAGE),
        )
        status, returns, reach, orphans, waiting, step, seq = header
        seen = int(seq or 0)
        has_ended = status is not None and Lifecycle(status).is_terminal
        calls = tuple(map(call_at, addresses)) if returns == "1" and has_ended else ()
        if not reach:
            return Owed(calls, seen=seen)
        found = await self._awaited(key, waiting or "", step)
        runs = tuple(orphans.split()[1:]) if orphans else tuple(found.values())
        return Owed(calls, Want(reach), runs, seen)

    async def awaited(self, run_id: str) -> tuple[str, ...]:
        """Return the runs whose ends a run waits for now, since calls of its step are these."""
        key = self._keys.run(run_id)
        waiting, step = await self._connection.execute("HMGET", key, "waiting", "step")
        return tuple((await self._awaited(key, waiting or "", step)).values())

    async def begun(self, run_id: str) -> frozenset[str]:
        """Return the runs among these that a worker may be starting at this moment."""
        key, now = self._keys.run(run_id), milliseconds(await self._connection.now())
        names = ("waiting", "step", "orphans")
        waiting, step, orphans = await self._connection.execute("HMGET", key, *names)
        if orphans:
            till, *runs = orphans.split()
            return frozenset(runs if int(till) > now else ())
        found = await self._awaited(key, waiting or "", step)
        if not found:
            return frozenset()
        parts = [f"{part}:{index}" for index in found for part in "ol"]
        values = await self._connection.execute("HMGET", f"{key}:journal", *parts)
        pairs = zip(found.values(), values[::2], values[1::2], strict=True)
        return frozenset(run for run, owner, till in pairs if owner and float(till or 0) > now)

    async def started(self, run_id: str) -> tuple[str, ...]:
        """Return the runs that calls of a run's open step have started, ended ones too."""
        journal = f"{self._keys.run(run_id)}:journal"
        names = await self._connection.execute("HKEYS", journal)
        # What people are asked has such a key, too, which is no run's id.
        names = sorted((one for one in names if one.startswith("k:")), key=lambda one: int(one[2:]))
        if not names:
            return ()
        ids = [one for one in await self._connection.execute("HMGET", journal, *names) if one]
        there = await self._connection.execute_all(
            *(("EXISTS", self._keys.run(one)) for one in ids)
        )
        return tuple(one for one, exists in zip(ids, there, strict=True) if exists)

    async def _awaited(self, key: str, waiting: str, step: str) -> dict[int, str]:
        """Return the runs that calls wait for, by the indexes of these."""
        waits = [one for one in waits_in(waiting, step) if one.queue == Awaited.RUN]
        if not waits:
            return {}
        names = [f"k:{one.index}" for one in waits]
        found = await self._connection.execute("HMGET", f"{key}:journal", *names)
        return {wait.index: one for wait, one in zip(waits, found, strict=True) if one}

    async def settled(self, run_id: str, owed: Owed) -> int:
        """Note that these calls were answered, and that the request has reached its runs.

        Returns how many calls are left.
        """
        given = (owed.request or "", owed.seen, *map(address_of, owed.calls))
        return int(await self._scripts.run("settled", run_id, *given))
