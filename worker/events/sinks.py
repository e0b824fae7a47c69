"""The event deliveries of a worker, from its settings: one per webhook, one for pub/sub."""

import hashlib
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress

from stepfleet.orchestrator.agents.overrides import with_stored_overrides
from stepfleet.orchestrator.errors import AgentException
from stepfleet.orchestrator.events.broadcast.config import BroadcastConfig
from stepfleet.orchestrator.events.broadcast.port import Envelope
from stepfleet.orchestrator.events.broadcast.pubsub import RedisPubSub
from stepfleet.orchestrator.events.broadcast.webhook import Webhook
from stepfleet.orchestrator.events.envelope import EventType, channel_of
from stepfleet.orchestrator.settings.settings import Settings
from stepfleet.orchestrator.store.store import Store
from stepfleet.worker.events.delivery import EventDelivery, Sink

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
