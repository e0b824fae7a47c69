"""The broker transport that fetches and acknowledges in batches, over Redis.

Call ``register()`` once where the Celery app is made; then broker URLs may begin with
``redis-batch://``, ``rediss-batch://`` (TLS) or ``redis-batch+socket://`` (unix socket). Only
workers gain by it: clients and stock workers use the same broker with kombu's own transport.
"""

import re

from kombu.transport import TRANSPORT_ALIASES

from stepfleet.worker.transport.ledger import counts as counts
from stepfleet.worker.transport.quarantine import QUARANTINE as QUARANTINE
from stepfleet.worker.transport.quarantine import read_entry as read_entry

_ALIASES = {
    "redis-batch": "stepfleet.worker.transport.transport:Transport",
    "rediss-batch": "stepfleet.worker.transport.transport:TlsTransport",
}


def register() -> None:
    """Teach kombu the URL schemes; repeating it is harmless."""
    TRANSPORT_ALIASES.update(_ALIASES)


def batch_url(url: str) -> str:
    """Return the broker URL with this transport's scheme.

    Takes ``redis://``, ``rediss://``, ``redis+socket://`` and redis-py's ``unix://`` (whose ``db``
    becomes kombu's ``virtual_host``); returns any other unchanged, such as RabbitMQ's.
    """
    if url.startswith("unix://"):
        path = re.sub(r"([?&])db=", r"\1virtual_host=", url.removeprefix("unix://"))
        return f"redis-batch+socket://{path}"
    return re.sub(r"^(rediss?)(\+socket)?://", r"\1-batch\2://", url)
