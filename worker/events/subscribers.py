"""Calls an agent's subscribers beside its steps: in order, one after the other, never waited for.

What comes faster than functions take it is dropped and counted: listening must not cost a step.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping

from stepfleet.orchestrator.events.envelope import Events
from stepfleet.orchestrator.events.subscribers import Moment, Subscribers
from stepfleet.orchestrator.protocol.claim import Claim, Committed, Refusal, StepHint
from stepfleet.orchestrator.protocol.commit_events import domain_events
from stepfleet.orchestrator.protocol.verdict import Move, Verdict
from stepfleet.worker.ports import Store

log = logging.getLogger(__name__)

MOST_WAITING = 10_000
Call = Callable[[], Awaitable[None]]


class Listening:
    """A queue of calls, at most `most` waiting. `dropped` counts those there was no room for."""

    def __init__(self, most: int = MOST_WAITING) -> None:
        self._calls: asyncio.Queue[Call] = asyncio.Queue(most)
        self._calling: asyncio.Task[None] | None = None
        self.dropped = 0

    def offer(self, call: Call) -> None:
        """Have `call` made soon. Belongs to the running event loop."""
        if self._calling is None:
            self._calling = asyncio.get_running_loop().create_task(self._work())
        try:
            self._calls.put_nowait(call)
        except asyncio.QueueFull:
            self.dropped += 1
            if self.dropped == 1:
                log.warning("subscribers are too slow: what they are told is dropped")

    async def settle(self, seconds: float) -> None:
        """Return when all calls were made, or after `seconds`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._calls.join()

    async def aclose(self) -> None:
        """Make no further calls."""
        if self._calling is not None:
            self._calling.cancel()
            await asyncio.gather(self._calling, return_exceptions=True)

    async def _work(self) -> None:
        while True:
            call = await self._calls.get()
            try:
                await call()
            except Exception:
                log.exception("subscribers could not be told")
            finally:
                self._calls.task_done()


class ListenedStore:
    """The store of steps, telling subscribers (by agent) of claims and commits that succeeded."""

    def __init__(
        self, store: Store, subscribers: Mapping[str, Subscribers], listening: Listening
    ) -> None:
        self._store = store
        self._subscribers = subscribers
        self._listening = listening
        self.journal = store.journal

    async def claim(self, hint: StepHint, token: str) -> Claim | Refusal:
        """Take a step, or be refused."""
        claim = await self._store.claim(hint, token)
        if isinstance(claim, Claim) and (told := self._subscribers.get(claim.config.name)):
            state, moment = claim.state, moment_of(claim)
            self._listening.offer(lambda: told.call("step_start", moment, state, apart=True))
        return claim

    async def commit(self, claim: Claim, verdict: Verdict, events: Events) -> Committed:
        """Write a verdict, all or nothing."""
        committed = await self._store.commit(claim, verdict, events)
        if committed.applied and (told := self._subscribers.get(claim.config.name)):
            self._listening.offer(lambda: _tell_commit(told, claim, verdict, events))
        return committed


def moment_of(claim: Claim) -> Moment:
    """Return where the claim's step is."""
    return Moment(claim.run_id, claim.config.name, claim.number, claim.state.info.execution_id)


async def _tell_commit(told: Subscribers, claim: Claim, verdict: Verdict, events: Events) -> None:
    moment = moment_of(claim)
    if verdict.logged:
        await told.call("step_end", moment, verdict.logged.result, apart=True)
    for event in domain_events(verdict, events):
        await told.tell(event, apart=True)
    if verdict.move is Move.FINISH:
        await told.call("agent_finish", moment, verdict.state, apart=True)
