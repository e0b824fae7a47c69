"""Tells whether the worker of this container answers over the broker; exit code 0 or 1."""

import os
import socket
import sys

from celery import Celery

_WAIT_SECONDS = 5.0


def main() -> int:
    """Ping the workers whose node name ends with this host's name."""
    broker = os.environ.get("STEPFLEET_BROKER_URL") or os.environ["STEPFLEET_REDIS_URL"]
    with Celery(broker=broker, set_as_current=False) as app:
        answers = app.control.broadcast(
            "ping",
            reply=True,
            timeout=_WAIT_SECONDS,
            limit=1,
            pattern=f"*@{socket.gethostname()}",
            matcher="glob",
        )
    return 0 if answers else 1


if __name__ == "__main__":
    sys.exit(main())
