"""Makes sure that a command's Redis can be reached, and warns of one that endangers runs."""

import time

from stepfleet.orchestrator.cli.terminal.output import notice
from stepfleet.orchestrator.errors import StoreError
from stepfleet.orchestrator.store.fleet.servers import RedisFacts, health_findings, redis_facts

_PAUSE_SECONDS = 0.25


def warn_of(url: str, *, patience: float = 0.0, prefix: str = "") -> None:
    """Print warnings about a server that endangers runs. Raises as `redis_facts`."""
    for finding in health_findings(reach(url, patience=patience, prefix=prefix).server):
        notice(f"WARNING: {finding.text}")


def reach(url: str, *, patience: float = 0.0, prefix: str = "") -> RedisFacts:
    """Return the facts of a server, which is tried again for `patience` seconds, with a notice.

    Raises as `redis_facts`.
    """
    deadline = time.monotonic() + patience
    noticed = False
    while True:
        try:
            return redis_facts(url, prefix=prefix)
        except StoreError:
            if time.monotonic() >= deadline:
                raise
            if not noticed:
                notice(f"Redis cannot be reached; retrying for {patience:g} s.")
                noticed = True
            time.sleep(_PAUSE_SECONDS)
