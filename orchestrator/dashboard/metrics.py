"""Flower's metrics, for whoever has its password: they name workers, agents and steps."""

from typing import Any

from flower.views.monitor import Metrics
from tornado import web


class GuardedMetrics(Metrics):
    """Flower's own page, behind its authentication; without a password for this machine only."""

    @web.authenticated
    async def get(self) -> None:
        """Answer in Prometheus's format."""
        await super().get()


def routes() -> list[Any]:
    """Return the page's address."""
    return [web.url("/metrics", GuardedMetrics)]
