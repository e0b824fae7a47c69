"""Translates a broker's URL for Celery and kombu: kombu's URL, and Celery's settings beside it.

Opens nothing.
"""

import re
from contextlib import suppress
from typing import Any

from celery import Celery
from kombu.pools import connections, producers
from kombu.transport import TRANSPORT_ALIASES
from kombu.utils.collections import eqhash
from redis.backoff import NoBackoff
from redis.retry import Retry

from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.redis_client.sentinel import sentinel_options
from stepfleet.orchestrator.redis_client.urls import (
    SentinelUrl,
    is_sentinel,
    parse_sentinel,
)

_LEFT: list[object] = []
SILENCE_SECONDS = 5.0
"""How long a server may be silent before its connection counts as dead."""

_OURS = ("unix://", "redis-batch", "rediss-batch")
_REDIS = re.compile(r"(rediss?|unix|redis(s?-batch|\+socket|-batch\+socket))://")
# kombu's own defaults wait for ever for a server that has stopped in its tracks.
_BOUNDED = {
    "socket_timeout": SILENCE_SECONDS,
    "socket_connect_timeout": SILENCE_SECONDS,
    "health_check_interval": SILENCE_SECONDS,
}
# For publishers: kombu's default tries for ever to connect, and its caller waits.
_IMPATIENT = {"max_retries": 1, "interval_start": 0.1, "interval_step": 0.2, "interval_max": 0.5}


def forget_pools(app: Celery) -> None:
    """Leave the connections that an app publishes by to the process that this one was forked of.

    kombu shares its pools by address, so a new app would find them again. Nothing is closed.
    """
    with suppress(Exception):  # whatever a transport says about its address
        address = app.connection_for_write()
        found = eqhash(address)  # type: ignore[no-untyped-call]
        _LEFT.extend(dict.pop(pools, found, None) for pools in (connections, producers))


def kombu_url(url: str) -> str:
    """Return a broker URL as kombu writes it.

    It has a scheme of its own for unix sockets, and a whole URL for each Sentinel. Raises
    `ConfigurationError` for an unusable Sentinel URL, and a scheme that kombu does not know.
    """
    if is_sentinel(url):
        return ";".join(sentinels_of(url).one_by_one())
    scheme = url.partition("://")[0]
    known = {scheme, scheme.partition("+")[0]} & TRANSPORT_ALIASES.keys()
    if not (known or "." in scheme or url.startswith(_OURS)):
        msg = (
            "the broker's URL begins with no transport that kombu knows: write redis://, rediss://,"
            " sentinel:// or amqp:// (RabbitMQ)"
        )
        raise ConfigurationError(msg)
    if not url.startswith("unix://"):
        return url
    path = re.sub(r"([?&])db=", r"\1virtual_host=", url.removeprefix("unix://"))
    return f"redis+socket://{path}"


def kombu_conf(url: str, prefix: str = "") -> dict[str, Any]:
    """Return the Celery settings that a broker needs beside its URL.

    `prefix` begins the keys of a Redis; other brokers have none.

    Raises `ConfigurationError` for an unusable Sentinel URL.
    """
    named = {"global_keyprefix": prefix} if prefix else {}
    if is_sentinel(url):
        conf = _sentinel_conf(sentinels_of(url))
        conf["broker_transport_options"] |= named
        return conf
    bounded = {**_BOUNDED, **named} if _REDIS.match(url) else {}
    return {"broker_transport_options": {**_IMPATIENT, **bounded}}


def _sentinel_conf(parsed: SentinelUrl) -> dict[str, Any]:
    options = {
        **_IMPATIENT,
        **_BOUNDED,
        "master_name": parsed.service,
        "sentinels": list(parsed.sentinels),
        "sentinel_kwargs": {**sentinel_options(parsed), "retry": Retry(NoBackoff(), 0)},
    }
    conf: dict[str, Any] = {"broker_transport_options": options}
    if parsed.tls is not None:
        conf["broker_use_ssl"] = {"ssl_cert_reqs": "required", **parsed.tls}
    return conf


def sentinels_of(url: str) -> SentinelUrl:
    """Return a broker's Sentinels. Raises `ConfigurationError` for an unusable URL."""
    try:
        return parse_sentinel(url)
    except ValueError as error:
        raise ConfigurationError(f"the broker's URL is no usable address: {error}") from None
