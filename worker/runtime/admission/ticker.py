"""Looks after the lines of the fleet's limits: admits as time makes room.

Workers take turns by the script's answer: one comes back when somebody can be admitted, the others
now and then. Without limits a worker looks every two seconds whether there are some.
"""

import asyncio
import logging
import random
import time

from stepfleet.orchestrator.store import keys
from stepfleet.orchestrator.store.admission import DONE, TICK, refunding, renewing
from stepfleet.orchestrator.store.store import Store
from stepfleet.worker.leases.lease import Leases
from stepfleet.worker.leases.renewal import RENEWALS_PER_LEASE
from stepfleet.worker.runtime.admission.gate import ERRORS, Gate

log = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
LINES_SECONDS = 60.0
LINES_SECONDS_ACTIVE = 5.0
LEAST_SECONDS, MOST_SECONDS = 0.02, 0.5
OTHERS_SECONDS = 1.6
"""A worker without the turn comes back later than the one with it may stay away."""


class Ticker:
    """The background task of one event loop's gate: `leases` has the steps that it executes.

    The limits of the settings are in `opened`.
    """

    def __init__(self, opened: Store, gate: Gate, leases: Leases) -> None:
        self._opened = opened
        self._gate = gate
        self._leases = leases
        self._configured = opened.settings.limits
        self._every = opened.settings.lease / RENEWALS_PER_LEASE
        self._renewed_at = time.monotonic()
        self._looked_at = float("-inf")
        self._swept = self._scanned = "0"

    async def prepare(self) -> None:
        """Write the limits of the settings, and read all. Raises `StoreError`."""
        await self._gate.settings.provide(self._configured)
        await self._gate.reload()
        await self._look_after_lines()

    async def watch(self) -> None:
        """Tick until cancelled. Errors are logged, and the next turn tries again."""
        is_put_off = False
        while True:
            await self._sleep()
            try:
                await self.turn()
            except ERRORS as error:
                log.log(logging.DEBUG if is_put_off else logging.WARNING, "limits: %s", error)
                is_put_off = True
                await asyncio.sleep(LEAST_SECONDS * 10)
            except Exception:
                log.exception("the look after limits failed")
                await asyncio.sleep(1)
            else:
                is_put_off = False

    async def turn(self) -> None:
        """Do what is due now. Raises `StoreError`."""
        gate = self._gate
        if not gate.active and not gate.held:
            await self._count_workers()
            if await gate.settings.version() != gate.version:
                await gate.reload()
            if time.monotonic() - self._looked_at >= LINES_SECONDS:
                await self._look_after_lines()
            return
        gate.wakes_at = float("inf")
        await gate.publish_again()
        if time.monotonic() - self._renewed_at >= self._every:
            self._renewed_at = time.monotonic()
            await self._renew()
        await gate.call(TICK)
        if gate.wiped:
            await self._rebuild()
        if time.monotonic() - self._looked_at >= LINES_SECONDS_ACTIVE:
            await self._look_after_lines()

    async def _sleep(self) -> None:
        """Sleep until the next turn: the script says when, if it is this worker's."""
        gate = self._gate
        gate.wake.clear()
        idle = LOOK_SECONDS if not gate.active else min(OTHERS_SECONDS, self._every)
        latest = time.monotonic() + idle * (1 + 0.2 * random.random())  # noqa: S311 - spreads turns
        while (at := min(latest, gate.wakes_at)) > (now := time.monotonic()):
            pause = at - now if at == latest else min(max(at - now, LEAST_SECONDS), MOST_SECONDS)
            try:
                async with asyncio.timeout(pause):
                    await gate.wake.wait()
                gate.wake.clear()
            except TimeoutError:
                return
        await asyncio.sleep(LEAST_SECONDS)

    async def _renew(self) -> None:
        """Renew the grants that are used here; those that somebody has settled are forgotten.

        So are those whose steps were taken from this process: whoever has them now uses theirs.
        """
        for used in list(self._gate.held.values()):
            is_left = used.hint not in self._leases.held
            if is_left and used.is_left:  # twice: its claim may just have been answered
                self._gate.forget(used.hint)
            used.is_left = is_left
        hints = [used.hint for used in self._gate.held.values()]
        words = await asyncio.gather(*(self._gate.call(renewing(hint)) for hint in hints))
        for hint, word in zip(hints, words, strict=True):
            if word != DONE:
                self._gate.forget(hint)

    async def _rebuild(self) -> None:
        """Write again what somebody has wiped."""
        log.warning(
            "the limits were wiped in Redis; they are written again from this worker's copy"
        )
        await self._gate.settings.begin_with(self._gate.limits, self._configured)
        await self._gate.reload()

    async def _count_workers(self) -> None:
        known = await self._opened.connection.execute("HLEN", self._opened.keys.of(keys.WORKERS))
        self._gate.learning.workers = int(known)

    async def _look_after_lines(self) -> None:
        """Drop the places of runs that are over, and see whether steps wait without a limit."""
        gate = self._gate
        self._looked_at = time.monotonic()
        await self._count_workers()
        if gate.limits:
            self._swept = await gate.settings.sweep(self._swept)
        if gate.waiting:  # cancelled runs need no turn
            self._scanned, over = await gate.calls.ended_among_waiting(self._scanned)
            gate.end([refunding(hint) for hint in over])
            if over:
                self._looked_at = float("-inf")
        gate.stranded = await gate.calls.is_used()
