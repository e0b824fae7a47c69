"""Tells whether the worker of this container answers over the broker; exit code 0 or 1."""

import socket
import sys

from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.settings.settings import load_settings
from stepfleet.orchestrator.store.store import client_app

_WAIT_SECONDS = 5.0


def main() -> int:
    """Ping the workers whose node name ends with this host's name.

    The broker is the one that the worker's settings name: Sentinels, or that beside a cluster.
    """
    try:
        with client_app(load_settings()) as app:
            answers = app.control.broadcast(
                "ping",
                reply=True,
                timeout=_WAIT_SECONDS,
                limit=1,
                pattern=f"*@{socket.gethostname()}",
                matcher="glob",
            )
    except ConfigurationError as error:
        print(error, file=sys.stderr)
        return 1
    return 0 if answers else 1


if __name__ == "__main__":
    sys.exit(main())
