"""Brings back to work what nobody holds: retries that are due, runs of dead workers, lost hints.

It is at once the retry timer, the orphan collector, and the recovery after a lost broker.
Every worker runs one; what several find, the script gives to one of them.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from stepfleet.orchestrator.dispatch import CallTask, Dispatch, call_label
from stepfleet.orchestrator.errors import AgentException, StoreError
from stepfleet.orchestrator.protocol.claim import StepHint
from stepfleet.orchestrator.protocol.waiting import ToolHint
from stepfleet.orchestrator.store.calls import run_script
from stepfleet.orchestrator.store.connection import Connection
from stepfleet.orchestrator.store.keys import Keys
from stepfleet.worker.crash import Visit, unharmed

log = logging.getLogger(__name__)

MOST_PER_SHARD = 200
MOST_LOOKS = 100
PUT_OFF = "rescue put off: %s"
SHARD_SECONDS = 5.0
"""So long a look waits for a shard; what answers later is heard by a later look."""


class Rescuer:
    """Looks for overdue runs every `interval` seconds, give or take a fifth.

    `long_queue`: above so many waiting messages, runs that are merely ready stay where they
    are; their message is most likely among those. Below a tenth of it they are looked for.
    `calm`: for so many seconds after trouble with a shard nothing of it is rescued. Workers that
    could not renew their leases meanwhile are alive, and hold what was paid for: they come first.
    """

    def __init__(
        self,
        connection: Connection,
        keys: Keys,
        dispatch: Dispatch,
        *,
        grace: float,
        interval: float,
        long_queue: int,
        jitter: Callable[[], float],
    ) -> None:
        self._connection = connection
        self._keys = keys
        self._dispatch = dispatch
        self._grace_ms = round(grace * 1000)
        self._interval = interval
        self._long_queue = long_queue
        self._jitter = jitter
        self.calm = 0.0
        self._asked: dict[int, asyncio.Task[Any]] = {}
        self._troubled: dict[int, float] = {}

    async def watch(
        self, crash: Visit = unharmed, told: Callable[[int], None] = lambda _: None
    ) -> None:
        """Rescue until cancelled. Trouble is logged and tried again at the next turn.

        `told` hears how many runs were dispatched again.
        """
        try:
            await self._watch(crash, told)
        finally:
            self.forget()

    def forget(self) -> None:
        """Drop what shards were asked and have not answered."""
        for asked in self._asked.values():
            asked.cancel()
        self._asked.clear()

    async def _watch(self, crash: Visit, told: Callable[[int], None]) -> None:
        is_put_off = False
        while True:
            await asyncio.sleep(self._interval * (0.8 + 0.4 * self._jitter()))
            try:
                rescued = await self.rescue_all(crash)
            except (AgentException, OSError) as error:
                log.log(logging.DEBUG if is_put_off else logging.WARNING, PUT_OFF, error)
                is_put_off = True
            except Exception:
                log.exception("rescue failed")
            else:
                is_put_off = False
                if rescued:
                    told(rescued)
                    log.info("dispatched %d overdue runs again", rescued)

    async def rescue_all(self, crash: Visit = unharmed) -> int:
        """Rescue until no shard has more overdue runs than one look takes; return how many."""
        rescued = 0
        for _ in range(MOST_LOOKS):
            published, is_more = await self.look(crash)
            rescued += published
            if not is_more:
                break
        return rescued

    async def rescue(self) -> int:
        """Publish the overdue runs of all shards once; return how many."""
        return (await self.look())[0]

    async def look(self, crash: Visit = unharmed) -> tuple[int, bool]:
        """Return how many overdue runs one look published, and whether a shard may have more.

        Shards in trouble are left alone for `calm` seconds. Raises what a shard failed with when
        those of the others are published, for trouble only where all of them are in it.
        """
        queue = self._shape_of_queue(await self._dispatch.waiting())
        answered = await self._ask(queue)
        failed = {shard: error for shard, one in answered.items() if (error := one.exception())}
        replies = [one.result() for shard, one in answered.items() if shard not in failed]
        self._troubled |= dict.fromkeys(failed, time.monotonic() + self.calm)
        hints = [hint for reply in replies for hint in _hints(reply[2:])]
        calls = [call for reply in replies for call in _calls(reply[1])]
        if hints or calls:
            crash("rescue-saved")
        await self._dispatch.publish(hints)
        await self._dispatch.publish_calls(calls)
        for error in failed.values():
            if not replies or not isinstance(error, StoreError):
                raise error
        return len(hints) + len(calls), any(int(reply[0]) >= MOST_PER_SHARD for reply in replies)

    async def _ask(self, queue: str) -> dict[int, asyncio.Task[Any]]:
        """Ask the shards that owe no answer; return what has been answered.

        Nothing is cut off for being late: the shard has put off the runs that it tells of.
        """
        new = {
            shard: asyncio.create_task(self._overdue(shard, queue))
            for shard in range(self._keys.shards)
            if shard not in self._asked and self._troubled.get(shard, 0.0) <= time.monotonic()
        }
        self._asked |= new
        if new:
            await asyncio.wait(new.values(), timeout=SHARD_SECONDS)
        answered = [shard for shard, asked in self._asked.items() if asked.done()]
        return {shard: self._asked.pop(shard) for shard in answered}

    async def _overdue(self, shard: int, queue: str) -> Any:
        due = [self._keys.due(shard)]
        return await run_script(
            self._connection, "rescue", due, MOST_PER_SHARD, self._grace_ms, queue, once=True
        )

    def _shape_of_queue(self, waiting: int) -> str:
        if waiting > self._long_queue:
            return "1"
        return "idle" if waiting * 10 <= self._long_queue else "0"


def _calls(reply: list[str]) -> list[CallTask]:
    told = zip(*[iter(reply)] * 5, strict=True)
    return [_call_task(*one) for one in told]


def _call_task(run_id: str, step: str, agent: str, index: str, place: str) -> CallTask:
    queue, _, tool = place.partition(":")
    label = call_label(agent, int(step), tool)
    return CallTask(ToolHint(run_id, int(step), int(index)), queue, label)


def _hints(reply: list[str]) -> list[tuple[StepHint, str]]:
    triples = zip(reply[::3], reply[1::3], reply[2::3], strict=True)
    return [(StepHint(run_id, int(step)), agent) for run_id, step, agent in triples]
