"""Flower with access control, bounded memory, a page about refused messages, and a JSON API."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepfleet.orchestrator.settings.settings import Settings


def install(settings: "Settings | None" = None, *, content: bool = True) -> None:
    """Add Stepfleet's JSON API to Flower: call it in `flowerconfig.py` of a stock `celery flower`.

    The fleet is that of `settings`, by default of the environment. Texts of models and tools are
    shown to users who have logged in; without `content` to nobody. Raises `ConfigurationError`.
    """
    from flower.urls import handlers  # noqa: PLC0415 - needs the extra `flower`

    from stepfleet.orchestrator.client.fleet import AsyncFleet  # noqa: PLC0415 - as above
    from stepfleet.orchestrator.dashboard.api.handling import Site  # noqa: PLC0415 - as above
    from stepfleet.orchestrator.dashboard.api.routes import api_routes  # noqa: PLC0415 - as above

    # Before the last one, which answers 404 to everything.
    handlers[-1:-1] = api_routes(Site(AsyncFleet(settings=settings), content))
