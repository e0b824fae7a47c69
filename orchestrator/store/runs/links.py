"""Links between runs: who waits for whose end, and which runs a request is to reach.

A run that has ended, or is paused, stays in `due` while it owes something; what is done twice
changes nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.protocol.claim import Want, Work
from stepfleet.orchestrator.records.calls.answers import After, Awaited
from stepfleet.orchestrator.records.conversation.messages import Message
from stepfleet.orchestrator.records.state import Lifecycle
from stepfleet.orchestrator.store.codec import (
    MESSAGES,
    WAIT,
    Fields,
    awaited_calls,
    duration,
    milliseconds,
)
from stepfleet.orchestrator.store.gateway import Gateway
from stepfleet.orchestrator.store.pace import SweepPace
from stepfleet.orchestrator.store.runs.reading import unknown_run
from stepfleet.orchestrator.store.runs.submission import address_of, call_at

PAGE = 200
"""Calls that are answered at once."""
RUNS_AT_ONCE = 100
"""Runs that are followed, or looked at, at once."""
BEGINNING = -1
"""In place of a call's index: what waits is the run itself."""
GONE, FULL, ENDED = "unknown", "full", "ended"
"""Replies to a request to send a run's end; any other one means that it will be sent."""


@dataclass(frozen=True, slots=True)
class Owed:
    """What a run owes: its end to `calls`, a page of them, and `request` to `runs` it started.

    `seen` is the number of its events by then: after another one it owes anew.
    """

    calls: tuple[Work, ...] = ()
    request: Want | None = None
    runs: tuple[str, ...] = ()
    seen: int = 0


class Links(Gateway):
    """Reads and writes the links of runs."""

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
        """Return the notices that a run owes to others now."""
        key = self._keys.run(run_id)
        header, addresses = await self._connection.execute_all(
            ("HMGET", key, "status", "returns", "reach", "orphans", "seq", *WAIT),
            ("SRANDMEMBER", f"{key}:returns", PAGE),
        )
        status, returns, reach, orphans, seq, *waits = header
        seen = int(seq or 0)
        has_ended = status is not None and Lifecycle(status).is_terminal
        calls = tuple(map(call_at, addresses)) if returns == "1" and has_ended else ()
        if not reach:
            return Owed(calls, seen=seen)
        found = await self._awaited(key, waits)
        runs = tuple(orphans.split()[1:]) if orphans else tuple(found.values())
        return Owed(calls, Want(reach), runs, seen)

    async def awaited(self, run_id: str) -> tuple[str, ...]:
        """Return the runs whose ends a run waits for now, since calls of its step are these."""
        key = self._keys.run(run_id)
        waits = await self._connection.execute("HMGET", key, *WAIT)
        return tuple((await self._awaited(key, waits)).values())

    async def begun(self, run_id: str) -> frozenset[str]:
        """Return the runs among these that a worker may be starting at this moment."""
        key, now = self._keys.run(run_id), milliseconds(await self._connection.now())
        orphans, *waits = await self._connection.execute("HMGET", key, "orphans", *WAIT)
        if orphans:
            till, *runs = orphans.split()
            return frozenset(runs if int(till) > now else ())
        found = await self._awaited(key, waits)
        if not found:
            return frozenset()
        parts = [f"{part}:{index}" for index in found for part in "ol"]
        values = await self._connection.execute("HMGET", f"{key}:journal", *parts)
        pairs = zip(found.values(), values[::2], values[1::2], strict=True)
        return frozenset(run for run, owner, till in pairs if owner and float(till or 0) > now)

    async def started(self, run_id: str) -> tuple[str, ...]:
        """Return the runs that calls of a run's open step have started, ended ones too."""
        journal = f"{self._keys.run(run_id)}:journal"
        names = await self._reads.execute("HKEYS", journal)
        # Calls that wait for a person have such a key, too, which is not a run's id.
        names = sorted((one for one in names if one.startswith("k:")), key=lambda one: int(one[2:]))
        if not names:
            return ()
        ids = [one for one in await self._reads.execute("HMGET", journal, *names) if one]
        there = await self._reads.execute_all(*(("EXISTS", self._keys.run(one)) for one in ids))
        return tuple(one for one, exists in zip(ids, there, strict=True) if exists)

    async def _awaited(self, key: str, stored: Sequence[str | None]) -> dict[int, str]:
        """Return the runs that calls wait for, by the indexes of these."""
        calls = awaited_calls(dict(zip(WAIT, stored, strict=True)))
        waits = [one for one in calls if one.queue == Awaited.RUN]
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


@dataclass(frozen=True, slots=True)
class Dependent:
    """A run that has not begun. `open` are the runs that it waits for, as far as is known."""

    run_id: str
    header: Fields
    after: After
    open: tuple[str, ...]


class Dependents(Gateway):
    """Reads and writes runs that wait for others."""

    async def read(self, run_id: str) -> Dependent | None:
        """Return a run that waits; None for any other."""
        key = self._keys.run(run_id)
        header, noted = await self._connection.execute_all(
            ("HGETALL", key), ("HKEYS", f"{key}:journal")
        )
        if "after" not in header:
            return None
        after = After.from_json(header["after"])
        known = {name.removeprefix("d:") for name in noted}
        return Dependent(run_id, header, after, tuple(one for one in after.ids if one not in known))

    async def follow(self, dependent: Dependent, runs: Sequence[str]) -> list[str]:
        """Have the ends of runs sent to `dependent`; return of each whether it has one."""
        address = address_of(Work(dependent.run_id, 0, BEGINNING))
        replies: list[str] = []
        pace = SweepPace(self._connection)
        for group in pace.groups(runs):
            calls = [self._pushing.call("follow", run, address) for run in group]
            replies += [reply[0] for reply in await pace.send(calls)]
        return replies

    async def arrived(self, run_id: str, before: str, agent: str = "") -> None:
        """Note that `before` has ended, for which a run may wait."""
        hint = Work(run_id, 0)
        message = self._dispatch.message(hint, agent)
        reply = await self._pushing.run("arrived", run_id, before, message)
        if reply[0] == "noted" and not int(reply[1]):
            await self._dispatch.published(hint, agent)

    async def wait(self, dependent: Dependent, seconds: float) -> bool:
        """Have the run looked at again after `seconds`; return whether all have ended by now."""
        return await self._write(dependent, "wait", later=duration(seconds)) == "ready"

    async def wait_again(self, dependent: Dependent, run: str) -> None:
        """Note that a run goes on that had ended."""
        await self._write(dependent, "again", run=run)

    async def begin(self, dependent: Dependent, messages: Sequence[Message]) -> bool:
        """Let the run begin with its input; return whether this call did."""
        hint, agent = Work(dependent.run_id, 0), dependent.header["agent"]
        done = await self._write(
            dependent,
            "begin",
            input=MESSAGES.dump_json(tuple(messages), exclude_defaults=True),
            grace=duration(self._settings.grace),
            message=self._dispatch.message(hint, agent),
        )
        if done == "begin":
            await self._dispatch.published(hint, agent)
        return done == "begin"

    async def end(self, dependent: Dependent, fields: Mapping[str, Any]) -> bool:
        """End the run without a step; return whether this call did."""
        return await self._write(dependent, "end", **fields) == "end"

    async def input_of(self, run_id: str) -> tuple[Message, ...]:
        """Return the messages that the run was submitted with, and those sent since."""
        log = f"{self._keys.run(run_id)}:log"
        stored = await self._connection.execute("HGET", log, "input:0")
        return tuple(MESSAGES.validate_json(stored)) if stored else ()

    async def _write(self, dependent: Dependent, what: str, **fields: Any) -> str:
        seq = dependent.header.get("seq", "")
        reply = await self._pushing.run("begin", dependent.run_id, seq, what=what, **fields)
        return str(reply[0])
