"""Flower with access control, bounded memory, pages of runs, batches and the fleet, and an API."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepfleet.orchestrator.settings.settings import Settings


def install(settings: "Settings | None" = None, *, content: bool | None = None) -> None:
    """Add Stepfleet's pages and API to a stock `celery flower`: call it in its `flowerconfig.py`.

    The fleet is that of `settings`, by default of the environment. Texts of models and tools are
    shown to users who have logged in; with `content` false, or the setting `flower_content`, to
    nobody. Raises `ConfigurationError`.
    """
    from flower.urls import handlers  # noqa: PLC0415 - needs the extra `flower`
    from flower.urls import settings as of_flower  # noqa: PLC0415 - as above

    from stepfleet.orchestrator.dashboard.api.handling import Site  # noqa: PLC0415 - as above
    from stepfleet.orchestrator.dashboard.api.routes import api_routes  # noqa: PLC0415 - as above
    from stepfleet.orchestrator.dashboard.quarantine import (  # noqa: PLC0415 - as above
        quarantine_routes,
        refused_by,
    )
    from stepfleet.orchestrator.dashboard.roles import guarded  # noqa: PLC0415 - as above
    from stepfleet.orchestrator.dashboard.tasks import adapt  # noqa: PLC0415 - as above
    from stepfleet.orchestrator.dashboard.web import (  # noqa: PLC0415 - as above
        Templates,
        page_routes,
    )
    from stepfleet.orchestrator.settings.settings import load_settings  # noqa: PLC0415 - as above

    site = Site.of(settings or load_settings(), content=content)
    adapt()
    of_flower["template_loader"] = Templates(of_flower["template_path"])
    # Before the last one, which answers 404 to everything.
    refused = quarantine_routes(refused_by(site))
    handlers[-1:-1] = [*page_routes(site), *api_routes(site), *refused]
    handlers[:] = guarded(handlers, site)
