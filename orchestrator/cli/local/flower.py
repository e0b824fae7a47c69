"""`stepfleet flower`: runs Flower on the fleet's broker."""

from importlib.util import find_spec
from pathlib import Path

from stepfleet.orchestrator.cli.setup.data_folder import known_redis
from stepfleet.orchestrator.cli.setup.redis_facts import redis_facts, refused_messages
from stepfleet.orchestrator.cli.terminal.output import notice
from stepfleet.orchestrator.dashboard.access import check_access
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.store.opening.opening import celery_app


def serve_flower(port: int, address: str, basic_auth: str | None, data: Path) -> None:
    """Serve until SIGINT or SIGTERM. Raises `AgentException` with the fix."""
    check_access(address, basic_auth)
    if find_spec("flower") is None:
        raise ConfigurationError('Flower is not installed: pip install "stepfleet[flower]"')
    # Imported here only: the module needs Flower.
    from stepfleet.orchestrator.dashboard.server import Address, serve  # noqa: PLC0415

    with known_redis(data) as settings:
        redis_facts(settings.store, prefix=settings.prefix)
        serve(
            celery_app(settings),
            Address(address, port, basic_auth),
            lambda url: notice(f"Flower: {url}"),
            lambda: refused_messages({settings.store, settings.broker}, settings.prefix),
        )
