"""Runs that wait for the ends of others before they begin: what they wait for, and what they get.

Such a run has a header's field `after`, and is not to be claimed; its journal has an entry for each
run that has ended, and `ahead` counts the others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stepfleet.orchestrator.protocol.claim import Work
from stepfleet.orchestrator.records.calls.answers import After
from stepfleet.orchestrator.records.conversation.messages import Message
from stepfleet.orchestrator.redis_client.connection import Connection
from stepfleet.orchestrator.store.dispatch import Dispatch
from stepfleet.orchestrator.store.keys import Keys
from stepfleet.orchestrator.store.lua import RunScripts
from stepfleet.orchestrator.store.pace import Pace
from stepfleet.orchestrator.store.records.codec import MESSAGES, Fields, duration
from stepfleet.orchestrator.store.runs.submission import address_of

PAGE = 100
"""Runs that are followed, or looked at, at once."""
BEGINNING = -1
"""In place of a call's index: what waits is the run itself."""
GONE, FULL, ENDED = "unknown", "full", "ended"
"""Replies to a request to send a run's end; any other one means that it will be sent."""


@dataclass(frozen=True, slots=True)
class Dependent:
    """A run that has not begun. `open` are the runs that it waits for, as far as is known."""

    run_id: str
    header: Fields
    after: After
    open: tuple[str, ...]


class Dependents:
    """Reads and writes runs that wait for others. `grace` in seconds."""

    def __init__(
        self, connection: Connection, keys: Keys, dispatch: Dispatch, grace: float
    ) -> None:
        self._connection = connection
        self._keys = keys
        self._dispatch = dispatch
        self._scripts = RunScripts(connection, keys, dispatch.queue_key)
        self._grace = grace

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
        pace = Pace(self._connection)
        for group in pace.groups(runs):
            calls = [self._scripts.call("follow", run, address) for run in group]
            replies += [reply[0] for reply in await pace.send(calls)]
        return replies

    async def arrived(self, run_id: str, before: str, agent: str = "") -> None:
        """Note that `before` has ended, for which a run may wait."""
        hint = Work(run_id, 0)
        message = self._dispatch.message(hint, agent)
        reply = await self._scripts.run("arrived", run_id, before, message)
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
            grace=duration(self._grace),
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
        reply = await self._scripts.run("begin", dependent.run_id, seq, what=what, **fields)
        return str(reply[0])
