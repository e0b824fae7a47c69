"""Why nothing moves while a client waits: no worker has it, a server is in trouble, people decide.

Reads now and then, and only while a wait has no progress. Decides the text; changes nothing.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, suppress

from redis.exceptions import RedisError

from stepfleet.orchestrator.errors import AgentException
from stepfleet.orchestrator.protocol.verdict import circuit_id
from stepfleet.orchestrator.records.calls.answers import Awaited
from stepfleet.orchestrator.store.batches.batches import run_id_of
from stepfleet.orchestrator.store.codec import WAIT, load_wait
from stepfleet.orchestrator.store.fleet.checks import serving
from stepfleet.orchestrator.store.fleet.overview import (
    Need,
    WorkerSeen,
    is_paused,
    needs_of,
    troubles,
    workers,
)
from stepfleet.orchestrator.store.limits import LimitStore
from stepfleet.orchestrator.store.store import Store

log = logging.getLogger(__name__)

PAUSED = "the fleet is paused: stepfleet resume --all"
QUIET_SECONDS = 3.0
"""How often a wait without progress looks for the reason."""
LOG_SECONDS = 60.0
"""How often the same reason is logged again, however many waits there are."""

READ_SECONDS = 1.0
"""The longest time that a wait stands still itself for the reason."""

Needs = Callable[[], Awaitable[Sequence[Need]]]
"""Reads what the runs that are waited for need."""
SAMPLED = 100
"""Runs that are looked at: of those that are held, and evenly of a batch."""
Held = Callable[[], Awaitable[str]]
"""Reads what holds that which is waited for; an empty text where nothing does."""
Asks = Callable[[], Awaitable[str]]
"""Reads which of the awaited calls wait for people; an empty text for none."""
_NAMED = 10
"""Runs before a run that are named."""


def lacking(
    seen: Iterable[WorkerSeen], steps: str, needs: Iterable[Need], exempt: Collection[str] = ()
) -> str:
    """Return what runs need and no living worker has, with the command; empty where all is there.

    `steps` is the queue of steps; workers need not announce the agents in `exempt`. Pure.
    """
    alive = [one for one in seen if one.alive]
    if not alive:
        return f"no worker is alive for queue {steps}: {serving(steps, steps)}"
    for need in needs:
        there = [one for one in alive if one.queues is None or need.queue in one.queues]
        if not there:
            return f"no worker is alive for queue {need.queue}: {serving(need.queue, steps)}"
        names = sorted({name for one in there for name in one.agents})
        if need.agent not in (*names, *exempt):
            found = f"no worker that is alive has agent {need.agent!r} (they have: "
            return f"{found}{', '.join(names) or 'none'}): {serving(need.queue, steps)}"
    return ""


class Standstill:
    """Finds out for all waits of a client why nothing moves, and reports it.

    `report` gets the reason, and an empty text when it is over; by default it is logged. Where
    `starts_workers`, the caller starts them: they may not be up yet.
    """

    def __init__(
        self, store: Store, exempt: Collection[str], *, starts_workers: bool = False
    ) -> None:
        self.report: Callable[[str], None] = self._log
        self._store = store
        self._exempt = exempt
        self._starts_workers = starts_workers
        self._reading: asyncio.Task[None] | None = None
        self._read_at = float("-inf")
        self._seen: list[WorkerSeen] = []
        self._troubles: list[str] = []
        self._logged: dict[str, float] = {}

    async def aclose(self) -> None:
        """End what is read."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])

    async def reason(self, needs: Needs, held: Held, asks: Asks) -> str:
        """Return why nothing moves; empty where nothing is wrong, or that cannot be read."""
        try:
            if self._reading or time.monotonic() - self._read_at >= QUIET_SECONDS:
                # Also without an end: a broker may swallow what is sent, and keep its thread.
                reading = self._reading = self._reading or asyncio.create_task(self._read())
                await asyncio.wait([reading], timeout=READ_SECONDS)
                if not reading.done():
                    return "" if self._store.dispatch.in_script else "the broker does not answer"
                if self._reading is reading:  # not another wait's, which began meanwhile
                    self._reading = None
                reading.result()
            found = self._troubles or await self._lacks(needs)
            return "; ".join(found or filter(None, (await held(), await asks())))
        except Exception:  # what only explains a wait must not end it
            log.debug("the reason of a standstill is unknown", exc_info=True)
            return ""

    async def of_run(self, run_id: str) -> str:
        """Return why no worker takes up a run; empty where one can. Raises `StoreError`."""
        if await is_paused(self._store):
            return PAUSED
        if self._starts_workers:
            return ""
        needs = await needs_of(self._store, [run_id])
        seen = await workers(self._store)
        return lacking(seen, self._store.settings.queue, needs, self._exempt)

    async def _lacks(self, needs: Needs) -> list[str]:
        if self._starts_workers:
            return []
        is_any = any(one.alive for one in self._seen)
        wanted = await needs() if is_any else ()
        lacks = lacking(self._seen, self._store.settings.queue, wanted, self._exempt)
        return [lacks] if lacks else []

    async def _read(self) -> None:
        with suppress(AgentException, RedisError):  # the connection logs an outage itself
            found = await troubles(self._store)
            self._troubles = found or ([PAUSED] if await is_paused(self._store) else [])
            self._seen = await workers(self._store)
        self._read_at = time.monotonic()

    def _log(self, reason: str) -> None:
        now = time.monotonic()
        if reason and now - self._logged.get(reason, float("-inf")) >= LOG_SECONDS:
            self._logged = {
                text: at for text, at in self._logged.items() if now - at < LOG_SECONDS
            } | {reason: now}
            log.warning(reason)


class Quiet:
    """One wait: `tick` is to be called again and again, and says whether nothing has moved."""

    def __init__(self, standstill: Standstill, needs: Needs, held: Held, asks: Asks) -> None:
        self._standstill = standstill
        self._needs = needs
        self._held = held
        self._asks = asks
        self._reason = ""
        self._next = time.monotonic() + QUIET_SECONDS

    async def tick(self, *, idle: bool) -> None:
        """Report why nothing moves where that is so for a while; and once, when it moves again."""
        reason, now = self._reason, time.monotonic()
        if not idle:
            reason, self._next = "", now + QUIET_SECONDS
        elif now >= self._next:
            reason = await self._standstill.reason(self._needs, self._held, self._asks)
            self._next = time.monotonic() + QUIET_SECONDS
        if reason != self._reason:
            self._reason = reason
            self._standstill.report(reason)


def held_batch(store: Store, batch_id: str) -> Held:
    """Return what reads the limits and services that hold runs of a batch, and those below them."""
    limits, circuits = store.limits, store.circuits

    async def own(run_ids: Sequence[str]) -> set[str]:
        """Return those that are of the batch, or that it pays for."""
        heads = await store.connection.execute_all(
            *(("HMGET", store.keys.run(one), "batch", "billed") for one in run_ids)
        )
        return {one for one, head in zip(run_ids, heads, strict=True) if batch_id in head}

    async def read() -> str:
        outages = [
            str(one)
            for one in await circuits.outages()
            if one.waiting and await own(await circuits.some_of(circuit_id(one.service), SAMPLED))
        ]
        waiting = await limits.some_waiting(SAMPLED)
        waits = {one: waiting[one] for one in await own(list(waiting))}
        if not waits and waiting:  # among many others
            rows = (await store.batches.get(batch_id)).rows
            every = range(0, rows, max(-(-rows // SAMPLED), 1))
            waits = await limits.waiting_for([run_id_of(batch_id, row) for row in every])
        return "; ".join([*outages, *await _named(limits, waits)])

    return read


def held_runs(store: Store, run_ids: Callable[[], Sequence[str]]) -> Held:
    """Return what reads the limits and services that hold these runs.

    Of runs that wait for others, below them, anything may be that holds anybody.
    """
    limits, circuits = store.limits, store.circuits

    async def read() -> str:
        some = run_ids()[:SAMPLED]
        heads = await store.connection.execute_all(
            *(("HMGET", store.keys.run(one), *WAIT) for one in some)
        )
        found = [load_wait(dict(zip(WAIT, head, strict=True))) for head in heads]
        known = [wait for wait in found if wait]
        waits_below = any(one.queue == Awaited.RUN for wait in known for one in wait.calls)
        out_for = {of for wait in known if wait.outage for of in wait.outage.circuits}
        outages = [
            str(one)
            for one in (await circuits.outages() if out_for or waits_below else ())
            if one.waiting and (waits_below or circuit_id(one.service) in out_for)
        ]
        waits = await limits.waiting_for(some)
        if not waits and waits_below:
            return "; ".join([*outages, *map(str, await limits.lines(1))])
        return "; ".join([*outages, *await _named(limits, waits)])

    return read


async def _named(limits: LimitStore, waits: Mapping[str, str]) -> list[str]:
    """Return in words for which limit most runs wait; `waits` has its name by run."""
    most = [name for name, _ in Counter(waits.values()).most_common(1)]
    return [str(one) for one in await limits.states(most)]


def approvals_of_batch(store: Store, batch_id: str) -> Asks:
    """Return a reader of the batch's calls that wait for people."""

    async def read() -> str:
        found = await store.approvals.count_of_batch(batch_id)
        return f"{found}: stepfleet approvals --batch {batch_id}" if found.count else ""

    return read


def approvals_of_runs(store: Store, run_ids: Callable[[], Sequence[str]]) -> Asks:
    """Return a reader of the calls of these runs, and of those below, that wait for people."""

    async def read() -> str:
        found = await store.approvals.count_of_runs(run_ids())
        return f"{found}: stepfleet approvals" if found.count else ""

    return read


@asynccontextmanager
async def explained_when_late(
    about: str, seconds: float | None, why: Callable[[], Awaitable[str]]
) -> AsyncGenerator[None, None]:
    """Raise `TimeoutError` after `seconds` that says what `why` does, which has a second for it."""
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        text = f"{about} has not ended after {seconds:g} s"
        with suppress(TimeoutError, AgentException, RedisError):
            async with asyncio.timeout(READ_SECONDS):
                text += f"; {await why()}"
        raise TimeoutError(text) from None


def begins_after(before: Mapping[str, str]) -> str:
    """Return for which runs one waits before it begins: ids and statuses. Pure."""
    named = ", ".join(f"{run} ({status})" for run, status in list(before.items())[:_NAMED])
    more = f" and {len(before) - _NAMED:,} more" if len(before) > _NAMED else ""
    return f"begins when these have ended: {named}{more}"
