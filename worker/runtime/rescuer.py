"""Dispatches again what nobody holds: retries that are due, runs of dead workers, lost hints.

It is the retry timer, the orphan collector, and the recovery after a lost broker in one. Every
worker has one, and they take turns; a run that several find is given to one of them by the script.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, Protocol

from stepfleet.orchestrator.errors import AgentException, StoreError
from stepfleet.orchestrator.protocol.claim import Work
from stepfleet.orchestrator.redis_client.connection import Connection
from stepfleet.orchestrator.store.dispatch import CallTask, Dispatch, call_label
from stepfleet.orchestrator.store.keys import RESCUER, Keys
from stepfleet.orchestrator.store.lua import run_script
from stepfleet.orchestrator.store.store import ClusterConnection
from stepfleet.worker.runtime.crash_points import Visit, unharmed

log = logging.getLogger(__name__)

Settle = Callable[[str], Awaitable[None]]


class Lines(Protocol):
    """Knows which runs wait for limits of the fleet, and how often to look whether they do."""

    @property
    def look_seconds(self) -> float:
        """After how long such a run is looked at again."""

    async def lost_among(self, run_ids: Sequence[str]) -> Collection[str]:
        """Return those that are in no line any more. Raises `StoreError`."""


MOST_PER_SCAN = 480
"""Overdue runs that one scan takes, over all shards: some milliseconds in which Redis serves nobody
else."""
MOST_PER_SHARD = 200
MOST_SCANS = 500
MOST_SETTLED = 50
"""Runs whose debts to others are settled at once."""
MOST_AGAIN = 40
"""So many hints may one scan publish again in a long queue, over all shards (one of each, where
there are more): otherwise every run that waits there would add hints without end."""
AGAIN_SECONDS = 600.0
"""Runs that were left in a long queue are published again so much later than in a short one."""
TURN = 0.75
"""The share of an interval after a scan without another; a single worker scans at each interval."""
PUT_OFF = "rescue put off: %s"
STEPPED = (
    "Redis's clock was set forward by %.1f s: nothing is rescued for %.1f s, so that workers"
    " renew what they hold"
)
SHARD_SECONDS = 5.0
"""So long a scan waits for a shard; a later answer is used by a later scan."""


class StoreClock:
    """Notices that Redis's clock was set forward, by this process's own, which nobody sets.

    Leases are times of Redis: such a clock ends them all at once, though their workers live and
    renew them. Keeps the last time at each place (a server, a shard), and when that was here.

    `tolerance`: steps of so many seconds are none. `elapsed` returns seconds that only grow.
    """

    def __init__(
        self, tolerance: float = math.inf, elapsed: Callable[[], float] = time.monotonic
    ) -> None:
        self.tolerance = tolerance
        self._elapsed = elapsed
        self._known: dict[str, tuple[float, int]] = {}

    def asks(self) -> float:
        """Return this process's time, to be given to `answered` with the request's answer."""
        return self._elapsed()

    def answered(self, place: str, sent: float, now_ms: int) -> float:
        """Return the seconds by which the clock of `place` was set forward; 0 where it was not.

        `now_ms` is its answer to the request of `sent`. The first answer proves nothing.
        """
        latest = self.latest(place)
        ahead = 0.0 if latest is None else (now_ms - latest) / 1000
        self._known[place] = (sent, now_ms)
        return ahead + self.tolerance if ahead > 0 else 0.0

    def latest(self, place: str) -> int | None:
        """Return the latest time (ms) that `place` can have now without having been set forward.

        None where that is not known.
        """
        if place not in self._known or math.isinf(self.tolerance):
            return None
        sent, now_ms = self._known[place]
        return now_ms + math.ceil((self._elapsed() - sent + self.tolerance) * 1000)


class Rescuer:
    """Scans for overdue runs every `interval` seconds, give or take a fifth, unless another does.

    `long_queue`: above so many waiting messages, runs that are merely ready stay where they
    are; their message is most likely among those. Below a tenth of it they are published.
    `again`: so many of those that waited longest are published again by one scan all the same.
    `calm`: for so many seconds after an error of a shard nothing of it is rescued. Workers that
    could not renew their leases meanwhile are alive, and hold what was paid for: they come first.
    `clock`: where it notices that Redis's was set forward, nothing is rescued for twice as long.
    `settle`: what sends a run's end, or a request to it, to others; this worker does it at once,
    since all slots may be taken by the runs that are to be cancelled. Without it a step does it.
    `lines`: who knows which runs that wait for limits are in no line any more; without it all of
    them are dispatched, and those that are in one go on waiting.
    """

    def __init__(  # noqa: PLR0913 - the settings of a scan, by their names
        self,
        connection: Connection,
        keys: Keys,
        dispatch: Dispatch,
        *,
        grace: float,
        interval: float,
        long_queue: int,
        jitter: Callable[[], float],
        calm: float = 0.0,
        clock: StoreClock | None = None,
        settle: Settle | None = None,
        lines: Lines | None = None,
    ) -> None:
        self._connection = connection
        self._keys = keys
        self._dispatch = dispatch
        self._grace_ms = round(grace * 1000)
        self._interval = interval
        self.long_queue = long_queue
        self._jitter = jitter
        self.calm = calm
        self.clock = clock or StoreClock()
        self.again = MOST_AGAIN
        self.settle = settle
        self.lines = lines
        self._settling: dict[str, asyncio.Task[None]] = {}
        self._room = asyncio.Semaphore(MOST_SETTLED)
        self._pending: dict[int, asyncio.Task[Any]] = {}
        self._calm_until: dict[int, float] = {}

    @property
    def _most(self) -> int:
        """The overdue runs that one scan takes of a shard."""
        return min(MOST_PER_SHARD, max(10, MOST_PER_SCAN // self._keys.shards))

    async def watch(
        self, crash: Visit = unharmed, rescued: Callable[[int], None] = lambda _: None
    ) -> None:
        """Rescue until cancelled. Errors are logged, and the next turn tries again.

        `rescued` receives how many runs were dispatched again.
        """
        is_put_off = False
        try:
            while True:
                await asyncio.sleep(self._interval * (0.8 + 0.4 * self._jitter()))
                try:
                    count = await self.rescue_all(crash, await self.take_turn())
                except (AgentException, OSError) as error:
                    log.log(logging.DEBUG if is_put_off else logging.WARNING, PUT_OFF, error)
                    is_put_off = True
                except Exception:
                    log.exception("rescue failed")
                else:
                    is_put_off = False
                    if count:
                        rescued(count)
                        log.info("dispatched %d overdue runs again", count)
        finally:
            self.forget()

    def forget(self) -> None:
        """Drop the requests that shards have not answered, and what is not settled yet."""
        for task in (*self._pending.values(), *self._settling.values()):
            task.cancel()
        self._pending.clear()
        self._settling.clear()

    def _settle(self, run_ids: Sequence[str], settle: Settle) -> None:
        """Begin to settle what runs owe; what fails is found again by a later scan."""

        async def one(run_id: str) -> None:
            try:
                async with self._room:
                    await settle(run_id)
            except (AgentException, OSError) as error:
                log.warning("what run %s owes to others is settled later: %s", run_id, error)
            except Exception:
                log.exception("what run %s owes to others cannot be settled", run_id)
            finally:
                self._settling.pop(run_id, None)

        for run_id in run_ids:
            if run_id not in self._settling:
                self._settling[run_id] = asyncio.create_task(one(run_id))

    async def take_turn(self) -> Collection[int]:
        """Return the shards that this rescuer is to scan now: no other one has recently.

        One turn is for the whole store; on a cluster each shard has its own, beside its runs. A
        turn whose request fails is taken: so every worker finds out which shards are away.
        """
        places: dict[str, list[int]] = {}
        for shard in range(self._keys.shards):
            places.setdefault(self._place_of(shard), []).append(shard)
        turns = await asyncio.gather(*map(self._request_turn, places))
        self._hold([ahead for _, ahead in turns], list(places.values()))
        return [
            one for turn, of in zip(turns, places.values(), strict=True) if turn[0] for one in of
        ]

    def _place_of(self, shard: int) -> str:
        on_cluster = isinstance(self._connection, ClusterConnection)
        return f"{self._keys.tag(shard)}rescuer" if on_cluster else self._keys.of(RESCUER)

    async def _request_turn(self, place: str) -> tuple[bool, float]:
        """Return whether it is this rescuer's turn, and by what the clock there was set forward."""
        pause = max(1, round(self._interval * TURN * 1000))
        sent = self.clock.asks()
        try:
            async with asyncio.timeout(SHARD_SECONDS):
                turn, now = await run_script(self._connection, "turn", [place], pause, once=True)
        except (AgentException, OSError):
            return True, 0.0
        return bool(turn), self.clock.answered(place, sent, int(now))

    def _hold(self, ahead: list[float], places: list[list[int]]) -> None:
        """Leave shards alone whose leases are over only because a clock was set forward."""
        if not any(ahead):
            return
        until = time.monotonic() + 2 * self.calm
        for seconds, shards in zip(ahead, places, strict=True):
            if seconds:
                self._calm_until |= dict.fromkeys(shards, until)
        log.warning(STEPPED, max(ahead), 2 * self.calm)

    async def rescue_all(
        self, crash: Visit = unharmed, shards: Collection[int] | None = None
    ) -> int:
        """Rescue until no shard has more overdue runs than one scan takes; return how many.

        `shards`: those to scan (default all).
        """
        count = 0
        if shards is not None and not shards:
            return 0
        for scans in range(MOST_SCANS):
            published, is_more = await self.look(crash, shards, self.again if scans == 0 else 0)
            count += published
            if not is_more:
                break
        return count

    async def rescue(self) -> int:
        """Publish the overdue runs of all shards once; return how many."""
        return (await self.look())[0]

    async def look(
        self,
        crash: Visit = unharmed,
        shards: Collection[int] | None = None,
        again: int | None = None,
    ) -> tuple[int, bool]:
        """Return how many overdue runs one scan published, and whether a shard may have more.

        `shards`: those to scan (default all); `again` replaces the attribute for this scan. Shards
        that failed are left alone for `calm` seconds. Raises a shard's error when the runs of the
        others are published; that it is away only where all of them are.
        """
        waiting, few = await self._dispatch.waiting(), self.long_queue / 10
        queue = "1" if waiting > self.long_queue else "idle" if waiting <= few else "0"
        places = range(self._keys.shards) if shards is None else shards
        answered = await self._request(places, queue, self.again if again is None else again)
        failed = {shard: error for shard, one in answered.items() if (error := one.exception())}
        replies = [one.result() for shard, one in answered.items() if shard not in failed]
        self._calm_until |= dict.fromkeys(failed, time.monotonic() + self.calm)
        hints = [hint for reply in replies for hint in _hints(reply[5:])]
        limited = [hint for reply in replies for hint in _hints(reply[4])]
        owing = [hint for reply in replies for hint in _hints(reply[3])]
        behind = [hint for reply in replies for hint in _hints(reply[2])]
        calls = [call for reply in replies for call in _calls(reply[1])]
        count = len(hints) + len(behind) + len(calls) + len(owing)
        if count:
            crash("rescue-saved")
        if self.settle is None:
            hints += owing
        else:
            self._settle([hint.run_id for hint, _ in owing], self.settle)
        await self._dispatch.publish(hints)
        await self._dispatch.publish(behind, behind=True)
        await self._dispatch.publish_calls(calls)
        lost = await self._lost(limited)
        await self._dispatch.publish(lost)
        for error in failed.values():
            if not replies or not isinstance(error, StoreError):
                raise error
        return count + len(lost), any(int(reply[0]) >= self._most for reply in replies)

    async def _lost(self, limited: Sequence[tuple[Work, str]]) -> list[tuple[Work, str]]:
        """Return those among runs that wait for limits that are in no line: its keys were lost."""
        if not limited or self.lines is None:
            return list(limited)
        async with asyncio.timeout(SHARD_SECONDS):
            lost = await self.lines.lost_among([hint.run_id for hint, _ in limited])
        if lost:
            log.warning("%d runs waited for limits in no line: they are dispatched", len(lost))
        return [one for one in limited if one[0].run_id in lost]

    async def _request(
        self, shards: Collection[int], queue: str, again: int
    ) -> dict[int, asyncio.Task[Any]]:
        """Send requests to the shards that owe no answer; return all that are answered.

        A late request is not cancelled: its shard has put off the runs that it answers.
        """
        new = {
            shard: asyncio.create_task(self._overdue(shard, queue, again))
            for shard in shards
            if shard not in self._pending and self._calm_until.get(shard, 0.0) <= time.monotonic()
        }
        self._pending |= new
        if new:
            await asyncio.wait(new.values(), timeout=SHARD_SECONDS)
        answered = [shard for shard, request in self._pending.items() if request.done()]
        return {shard: self._pending.pop(shard) for shard in answered}

    async def _overdue(self, shard: int, queue: str, again: int) -> Any:
        most = max(1, again // self._keys.shards) if again else 0
        latest = self.clock.latest(self._place_of(shard)) or ""
        look = round(self.lines.look_seconds * 1000) if self.lines else self._grace_ms
        given = (self._most, self._grace_ms, queue, most, round(AGAIN_SECONDS * 1000), latest, look)
        due = [self._keys.due(shard)]
        return await run_script(self._connection, "rescue", due, *given, once=True)


def _calls(reply: list[str]) -> list[CallTask]:
    calls = []
    for run_id, step, agent, index, queue, tool in zip(*[iter(reply)] * 6, strict=True):
        hint = Work(run_id, int(step), int(index))
        calls.append(CallTask(hint, queue, call_label(agent, hint.step, tool)))
    return calls


def _hints(reply: list[str]) -> list[tuple[Work, str]]:
    triples = zip(*[iter(reply)] * 3, strict=True)
    return [(Work(run_id, int(step)), agent) for run_id, step, agent in triples]
