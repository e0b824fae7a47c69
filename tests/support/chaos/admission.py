"""Workers under limits, all in one process: what they, their hints and Redis lose is drawn.

Store, gates, tickers and rescuers are the product's; models and tools are left out.
"""

import asyncio
import contextlib
import json
import random
import time
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, Self

import redis
from support.runs.stored_runs import Bench, answered, called, failed, with_settings

from stepfleet.orchestrator import ConfigurationError, StoreError
from stepfleet.orchestrator.events.envelope import Events
from stepfleet.orchestrator.protocol.attempt import Attempt
from stepfleet.orchestrator.protocol.claim import Claim, Work
from stepfleet.orchestrator.protocol.commit_events import events_of
from stepfleet.orchestrator.protocol.verdict import Facts, Move, Verdict
from stepfleet.orchestrator.store import keys
from stepfleet.worker.leases.lease import Leases
from stepfleet.worker.leases.renewal import renewing
from stepfleet.worker.runtime.admission.admitted_steps import AdmittedSteps
from stepfleet.worker.runtime.admission.gate import Gate
from stepfleet.worker.runtime.admission.ticker import Ticker
from stepfleet.worker.runtime.rescuer import Rescuer

MODEL, BATCH = "openai:none", "batch:b1"
LEASE, GRACE = 1.0, 0.3
LAST_STEP = 3
PRICE = 0.001
TROUBLE = StoreError, ConfigurationError
_DUMP = """
local found = {}
for _, key in ipairs(redis.call('KEYS', '*')) do
  found[#found + 1], found[#found + 2] = key, redis.call('DUMP', key)
  found[#found + 1] = redis.call('PTTL', key)
end
return found
"""


class UnluckyWorker:
    """Takes hints and does their steps, until it is to die; then another is in its place."""

    def __init__(self, desk: Bench, name: str, draw: random.Random) -> None:
        self._desk = desk
        self._name = name
        self._draw = draw
        self._births = 0
        self._steps_under_way: set[asyncio.Task[None]] = set()
        self.loses = True
        self.begin()

    def begin(self) -> None:
        """Be a new process: nothing is remembered."""
        for task in self._steps_under_way:
            task.cancel()
        self._births += 1
        self._leases = Leases(time.monotonic)
        opened = with_settings(self._desk.opened, lease=LEASE, grace=GRACE, retention=60)
        opened = replace(opened, worker=self._name)
        self._store = opened.steps
        self.gate = Gate(opened, f"{self._name}:{self._births}")
        self._ticker = Ticker(opened, self.gate, self._leases)
        self._admitted = AdmittedSteps(self._store, self.gate, lambda *_: PRICE)

    async def tick(self) -> None:
        """Look after limits, leases and overdue runs, as whatever process is there now."""
        rescuer = self._rescuer()
        born = 0
        while True:
            with contextlib.suppress(*TROUBLE):
                if born != self._births:
                    born = self._births
                    await self._ticker.prepare()
                await self._ticker.turn()
                for lease in self._leases:
                    await renewing(self._store)(lease)
                await rescuer.rescue_all()
            await asyncio.sleep(0.05)  # the pace of a ticker

    def _rescuer(self) -> Rescuer:
        opened = self._desk.opened
        given = (opened.connection, opened.keys, opened.dispatch)
        return Rescuer(*given, grace=GRACE, interval=0.1, long_queue=10_000, jitter=lambda: 0.5)

    async def work(self) -> None:
        """Take hints; some are lost."""
        opened = self._desk.opened
        while True:
            message = await opened.connection.execute("LPOP", opened.dispatch.queue_key)
            if message is None:
                await asyncio.sleep(0.01)  # polls, as long as the test runs
            elif not self._is_lost(0.1):
                args = json.loads(message)["headers"]["argsrepr"].replace("'", '"')
                run_id, step = json.loads(args)
                task = asyncio.create_task(self._step(Work(run_id, step)))
                self._steps_under_way.add(task)
                task.add_done_callback(self._steps_under_way.discard)

    def _is_lost(self, share: float) -> bool:
        return self.loses and self._draw.random() < share

    async def _step(self, hint: Work) -> None:
        with contextlib.suppress(asyncio.CancelledError, *TROUBLE):
            await asyncio.sleep(self._draw.choice((0.0, 0.0, 0.3)))  # on its way
            claim = await self._admitted.claim(hint, self._desk.token())
            if isinstance(claim, Claim) and not self._is_lost(0.03):  # else it forgets the step
                with self._leases.hold(claim):
                    await self._attempt(claim)

    async def _attempt(self, claim: Claim) -> None:
        await asyncio.sleep(self._draw.uniform(0.01, 0.1))  # the call of a model
        if self._is_lost(0.05):
            verdict = Verdict(Move.RELEASE, claim.state)
            await self._admitted.commit(claim, verdict, Events([]))
            return
        attempt = await self._attempted(claim)
        verdict = self._desk.verdict(claim, attempt)
        events = events_of(claim, attempt, verdict, Facts(claim.now))
        await self._admitted.commit(claim, verdict, events)

    async def _attempted(self, claim: Claim) -> Attempt:
        if self._is_lost(0.05):
            self.gate.note_refusal(MODEL, 0.2, 0.05)
            return failed(claim, transient=True, limited=True)
        if self._is_lost(0.05):
            return failed(claim, transient=True)
        attempt = answered(claim) if claim.step >= LAST_STEP else called(claim)
        if self._is_lost(0.2):
            await self._admitted.journal(claim, 0.1, response=attempt.response)
            await asyncio.sleep(self._draw.choice((0.05, 0.3)))  # its tools
        return attempt


class Losses:
    """What Redis loses: its newest writes, and single keys of the limits."""

    def __init__(self, url: str, draw: random.Random) -> None:
        self._client = redis.Redis.from_url(url)
        self._draw = draw
        self._dump = self._client.register_script(_DUMP)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    async def go_back(self) -> None:
        """Lose the writes of up to a second."""
        flat: list[Any] = self._dump()
        await asyncio.sleep(self._draw.uniform(0.05, 1.0))  # what is written meanwhile is lost
        again = self._client.pipeline(transaction=True)
        again.flushall()
        for key, data, left in zip(*[iter(flat)] * 3, strict=True):
            again.restore(key, max(int(left), 0), data)
        again.execute()

    async def lose_key(self) -> None:
        """Lose one of the limits' keys."""
        found = sorted(self._client.keys("sf:{limits}:*"))
        if found:
            self._client.delete(self._draw.choice(found))

    def numbers(self, key: str) -> dict[str, str]:
        """Return a hash of the limits."""
        found = self._client.hgetall(keys.NO_PREFIX.of(key))
        return {str(name): str(text) for name, text in found.items()}


async def change_limits(gate: Gate, draw: random.Random) -> None:
    """Set, clear or raise limits as people do."""
    match draw.randrange(4):
        case 0:
            await gate.settings.clear([MODEL])
        case 1:
            await gate.settings.change(BATCH, {"calls": draw.choice((10, 30)), "on_budget": "hold"})
        case 2:
            await gate.settings.clear([BATCH])
        case _:
            rate = {"requests_per_minute": draw.choice((300, 1200)), "burst": 0.5}
            await gate.settings.change(MODEL, {"in_flight": draw.randint(1, 5), **rate})


def strikes(
    worker: UnluckyWorker, losses: Losses, draw: random.Random
) -> Coroutine[Any, Any, None]:
    """Return the next trouble."""

    async def die() -> None:
        worker.begin()

    ways = (die, losses.go_back, losses.go_back, losses.lose_key)
    way = draw.choice((*ways, lambda: change_limits(worker.gate, draw)))
    return way()
