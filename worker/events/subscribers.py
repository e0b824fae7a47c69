"""Calls an agent's subscribers and broadcasters in the background: in order, one after the other.

No step waits for them. Calls that find the queue full are dropped and counted.
"""

import asyncio
import contextlib
import hashlib
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress

from stepfleet.orchestrator.agents.config import with_stored_overrides
from stepfleet.orchestrator.errors import AgentException
from stepfleet.orchestrator.events.broadcast import RedisPubSub, Webhook
from stepfleet.orchestrator.events.domain_events import (
    AgentStepStarted,
    DomainEvent,
    ToolCallStarted,
)
from stepfleet.orchestrator.events.envelope import Events, EventType, channel_of
from stepfleet.orchestrator.events.subscribers import BroadcastConfig, Envelope, Moment, Subscribers
from stepfleet.orchestrator.protocol.claim import Claim, Committed, Refusal
from stepfleet.orchestrator.protocol.commit_events import domain_events
from stepfleet.orchestrator.protocol.verdict import Move, Verdict
from stepfleet.orchestrator.settings.settings import Settings
from stepfleet.orchestrator.store.store import Store
from stepfleet.worker.events.delivery import EventDelivery, Sink
from stepfleet.worker.ports import StepObserver

_STARTS = (EventType.STEP_STARTED, EventType.TOOL_STARTED)


class EventFilter:
    """Drops the events that a run's `BroadcastConfig` excludes.

    `live`: the destination has received the starts of runs that stream already, when they
    happened, so their events are dropped.
    """

    def __init__(self, store: Store, *, live: bool = False) -> None:
        self._store = store
        self._judged = {EventType.STATUS, *(_STARTS if live else ())}

    async def broadcast(self, envelopes: tuple[Envelope, ...]) -> list[Envelope]:
        """Return those that are broadcast, in order. Raises `StoreError` as the store does."""
        judged = {one["session_id"] for one in envelopes if one["type"] in self._judged}
        known = await self._broadcasts(sorted(judged))
        return [
            one
            for one in envelopes
            if one["type"] not in self._judged or _sends(known.get(one["session_id"]), one["type"])
        ]

    async def _broadcasts(self, run_ids: list[str]) -> dict[str, BroadcastConfig]:
        headers = await self._store.connection.execute_all(
            *(("HMGET", self._store.keys.run(run_id), "config", "overrides") for run_id in run_ids)
        )
        found = {}
        for run_id, (digest, overrides) in zip(run_ids, headers, strict=True):
            # Written by a newer version: one event too many is the smaller harm.
            with suppress(AgentException):
                if digest:
                    config = with_stored_overrides(
                        await self._store.configs.load(digest), overrides
                    )
                    found[run_id] = config.broadcast
        return found


def _sends(config: BroadcastConfig | None, kind: str) -> bool:
    if config is None:
        return True
    if kind == EventType.STATUS:
        return config.auto_status_tracking
    return not config.include_stream_chunks


async def deliveries(opened: Store, owner: str, jitter: Callable[[], float]) -> list[EventDelivery]:
    """Return the deliveries of the store's settings; none by default.

    They receive the events of all writes from here on. Raises `StoreError` as the store does.
    """
    sinks = sinks_of(opened.settings)
    if not sinks:
        return []
    await opened.feeds.switch_on()
    # Two sets of services may share a process, and then a worker's name.
    own = f"{owner}/{secrets.token_hex(4)}"
    return [
        EventDelivery(
            one, opened.feeds, EventFilter(opened, live=one.live).broadcast, own, jitter=jitter
        )
        for one in sinks
    ]


def sinks_of(settings: Settings) -> list[Sink]:
    """Return the sinks of the settings. Their names hold the kind, never the address."""
    secret = settings.webhook_secret.get_secret_value() if settings.webhook_secret else ""
    found = [_webhook(str(url), secret) for url in settings.webhooks]
    if settings.events_url:
        url = settings.events_url.get_secret_value()
        live = settings.has_own_channels
        found.append(_channels(url, settings.prefix, live=live))
    return found


def _webhook(url: str, secret: str) -> Sink:
    webhook = Webhook(url, secret)
    return Sink(_name("webhook", url), webhook.deliver, webhook.aclose)


def _channels(url: str, prefix: str, *, live: bool) -> Sink:
    pubsub = RedisPubSub.at(url)

    async def deliver(envelopes: Sequence[Envelope]) -> None:
        for one in envelopes:
            await pubsub.broadcast(prefix + channel_of(one["session_id"]), one)

    return Sink(_name("channels", url), deliver, pubsub.aclose, live)


def _name(kind: str, address: str) -> str:
    return f"{kind}-{hashlib.sha256(address.encode()).hexdigest()[:12]}"


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
