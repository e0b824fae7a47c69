"""The broker transport that fetches and acknowledges in batches, over Redis.

Call ``register()`` once where the Celery app is made; then broker URLs may begin with
``redis-batch://``, ``rediss-batch://`` (TLS), ``redis-batch+socket://`` (unix socket) or
``sentinel-batch://`` (whose Sentinels are in the transport options). Only workers benefit:
clients and stock workers use the same broker with kombu's own transport.
"""

import re
from urllib.parse import quote

from kombu.transport import TRANSPORT_ALIASES

from stepfleet.orchestrator.redis_client.urls import is_sentinel, parse_sentinel
from stepfleet.orchestrator.store.fleet.quarantine import read_entry as read_entry
from stepfleet.orchestrator.store.keys import QUARANTINE as QUARANTINE
from stepfleet.worker.engine.transport.ack_buffer import counts as counts
from stepfleet.worker.engine.transport.fast_json import EVENTS as EVENTS
from stepfleet.worker.engine.transport.fast_json import register_events

_ALIASES = {
    "redis-batch": "stepfleet.worker.engine.transport.transport:Transport",
    "rediss-batch": "stepfleet.worker.engine.transport.transport:TlsTransport",
    "sentinel-batch": "stepfleet.worker.engine.transport.transport:SentinelTransport",
}


def register() -> None:
    """Register the URL schemes and the serializer with kombu; repeating it is harmless."""
    TRANSPORT_ALIASES.update(_ALIASES)
    register_events()


def batch_url(url: str) -> str:
    """Return the broker URL with this transport's scheme.

    Takes ``redis://``, ``rediss://``, ``redis+socket://`` and redis-py's ``unix://`` (whose ``db``
    becomes kombu's ``virtual_host``), and Stepfleet's ``sentinel://``, whose service it names;
    returns any other unchanged, such as RabbitMQ's. Raises ``ValueError`` for an unusable one.
    """
    if is_sentinel(url):
        parsed = parse_sentinel(url)
        service = quote(parsed.service, safe="")
        return f"sentinel-batch://{parsed.credentials}{service}/{parsed.db}"
    if url.startswith("unix://"):
        path = re.sub(r"([?&])db=", r"\1virtual_host=", url.removeprefix("unix://"))
        return f"redis-batch+socket://{path}"
    return re.sub(r"^(rediss?)(\+socket)?://", r"\1-batch\2://", url)
