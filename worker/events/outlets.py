"""Makes the couriers of a worker from its settings: one per webhook, one for pub/sub."""

import hashlib
import secrets
from collections.abc import Callable, Sequence

from stepfleet.orchestrator.events.broadcast.port import Envelope
from stepfleet.orchestrator.events.broadcast.pubsub import RedisPubSub
from stepfleet.orchestrator.events.broadcast.webhook import Webhook
from stepfleet.orchestrator.events.envelope import channel_of
from stepfleet.orchestrator.settings.settings import Settings
from stepfleet.orchestrator.store.events.feeds import Feeds
from stepfleet.orchestrator.store.opening.opening import OpenStore
from stepfleet.worker.events.courier import Courier, Outlet
from stepfleet.worker.events.event_filter import Quiet


async def couriers(opened: OpenStore, owner: str, jitter: Callable[[], float]) -> list[Courier]:
    """Return the couriers that the store's settings ask for; none by default.

    What begins from here on is fed to them. Raises `StoreError` as the store does.
    """
    outlets = outlets_of(opened.settings)
    if not outlets:
        return []
    feeds = Feeds(opened.connection, opened.keys)
    await feeds.switch_on()
    chosen = Quiet(opened.connection, opened.keys, opened.configs).broadcast_ones
    # Two sets of services may share a process, and then a worker's name.
    own = f"{owner}/{secrets.token_hex(4)}"
    return [Courier(one, feeds, chosen, own, jitter=jitter) for one in outlets]


def outlets_of(settings: Settings) -> list[Outlet]:
    """Return where the settings want events to go. Names tell the kind, never the address."""
    secret = settings.webhook_secret.get_secret_value() if settings.webhook_secret else ""
    found = [_webhook(str(url), secret) for url in settings.webhooks]
    if settings.events_url:
        found.append(_channels(settings.events_url.get_secret_value()))
    return found


def _webhook(url: str, secret: str) -> Outlet:
    webhook = Webhook(url, secret)
    return Outlet(_name("webhook", url), webhook.deliver, webhook.aclose)


def _channels(url: str) -> Outlet:
    pubsub = RedisPubSub.at(url)

    async def deliver(envelopes: Sequence[Envelope]) -> None:
        for one in envelopes:
            await pubsub.broadcast(channel_of(one["session_id"]), one)

    return Outlet(_name("channels", url), deliver, pubsub.aclose)


def _name(kind: str, address: str) -> str:
    return f"{kind}-{hashlib.sha256(address.encode()).hexdigest()[:12]}"
