"""Refuses worker options that would lose or duplicate work, with the reason.

Decides from names and options alone. Must not start or stop anything.
"""

from typing import Any

from celery.exceptions import ImproperlyConfigured
from kombu.utils.compat import detect_environment

_GREENLET_POOLS = ("gevent", "eventlet")

_WHY_NOT_GREENLETS = (
    "The {pool} pool is not supported: with a Redis broker it never takes back the messages of a"
    " worker that died, and acknowledges from every greenlet at once over 10 connections, which"
    " runs tasks twice. Start the worker without -P (stepfleet.worker.engine.pool gives 1,000"
    " tasks at once per process), or with -P prefork, -P threads or -P solo."
)


def check_pool(pool: object) -> None:
    """Raise ``ImproperlyConfigured`` for gevent and eventlet: a name, or a pool class."""
    name = pool if isinstance(pool, str) else f"{getattr(pool, '__module__', '')}:"
    for refused in _GREENLET_POOLS:
        if name == refused or f".{refused}:" in f".{name}":
            raise ImproperlyConfigured(_WHY_NOT_GREENLETS.format(pool=refused))


def refuse_greenlet_pools(sender: Any = None, **_: object) -> None:
    """End the start of a worker under gevent or eventlet: ``worker_init.connect(...)``.

    Raises ``SystemExit`` with the reason, since Celery only logs other exceptions of receivers.
    A package that is not installed already ends ``celery -P gevent`` before any app is loaded.
    """
    try:
        check_pool(getattr(sender, "pool_cls", None))
        check_pool(detect_environment())  # type: ignore[no-untyped-call]
    except ImproperlyConfigured as error:
        raise SystemExit(str(error)) from None
