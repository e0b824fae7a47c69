"""Calls an agent's subscribers beside its steps: in order, one after the other.

No step waits for them. Calls that find the queue full are dropped and counted.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping

from stepfleet.orchestrator.events.domain_events import (
    AgentStepStarted,
    DomainEvent,
    ToolCallStarted,
)
from stepfleet.orchestrator.events.envelope import Events
from stepfleet.orchestrator.events.subscribers import Moment, Subscribers
from stepfleet.orchestrator.protocol.claim import Claim, Committed, Refusal
from stepfleet.orchestrator.protocol.commit_events import domain_events
from stepfleet.orchestrator.protocol.verdict import Move, Verdict
from stepfleet.worker.ports import StepObserver

log = logging.getLogger(__name__)

MOST_WAITING = 10_000
Announced = tuple[str, int, str]
"""A start by its run, its step (from 1) and its tool call; the step's own has no call."""


class SubscriberQueue:
    """A queue of at most `most` calls. `dropped` counts the calls that found it full."""

    def __init__(self, most: int = MOST_WAITING) -> None:
        self._calls: asyncio.Queue[Callable[[], Awaitable[None]]] = asyncio.Queue(most)
        self._calling: asyncio.Task[None] | None = None
        self._announced: dict[Announced, None] = {}
        self.dropped = 0

    def announced(self, start: Announced) -> None:
        """Remember a start that was published before its step is committed; the newest ones."""
        self._announced[start] = None
        if len(self._announced) > MOST_WAITING:
            del self._announced[next(iter(self._announced))]

    def knows(self, start: Announced) -> bool:
        """Return whether that start was published already."""
        return start in self._announced

    def offer(self, call: Callable[[], Awaitable[None]]) -> None:
        """Make `call` soon. Belongs to the running event loop."""
        if self._calling is None:
            self._calling = asyncio.get_running_loop().create_task(self._work())
        try:
            self._calls.put_nowait(call)
        except asyncio.QueueFull:
            self.dropped += 1
            if self.dropped == 1:
                log.warning("subscribers are too slow: some of their events are dropped")

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
                log.exception("a call of subscribers failed")
            finally:
                self._calls.task_done()


class SubscriberObserver(StepObserver):
    """Calls subscribers (by agent) for steps that were claimed, and commits that were applied."""

    def __init__(self, subscribers: Mapping[str, Subscribers], listening: SubscriberQueue) -> None:
        self._subscribers = subscribers
        self._listening = listening

    def claimed(self, claim: Claim | Refusal) -> None:
        """Announce the step's start."""
        if isinstance(claim, Claim) and (found := self._subscribers.get(claim.config.name)):
            state, moment = claim.state, moment_of(claim)
            self._listening.offer(lambda: found.call("step_start", moment, state, in_thread=True))

    def committed(
        self, claim: Claim, verdict: Verdict, events: Events, committed: Committed
    ) -> None:
        """Announce the step, and what follows from it."""
        if committed.applied and (found := self._subscribers.get(claim.config.name)):
            self._listening.offer(lambda: self._announce(found, claim, verdict, events))

    async def _announce(
        self, found: Subscribers, claim: Claim, verdict: Verdict, events: Events
    ) -> None:
        moment = moment_of(claim)
        if verdict.logged:
            await found.call("step_end", moment, verdict.logged.result, in_thread=True)
        for event in domain_events(verdict, events):
            if not self._is_known(claim, event):
                await found.publish(event, in_thread=True)
        if verdict.move is Move.FINISH:
            await found.call("agent_finish", moment, verdict.state, in_thread=True)

    def _is_known(self, claim: Claim, event: DomainEvent) -> bool:
        if not isinstance(event, AgentStepStarted | ToolCallStarted):
            return False
        call = event.tool_call_id if isinstance(event, ToolCallStarted) else ""
        return self._listening.knows((claim.run_id, claim.number, call))


def moment_of(claim: Claim) -> Moment:
    """Return the moment of the claim's step."""
    return Moment(claim.run_id, claim.config.name, claim.number, claim.state.info.execution_id)
