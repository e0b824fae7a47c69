"""`stepfleet flower`: runs Flower on the fleet's broker."""

import asyncio
import os
from importlib.util import find_spec
from pathlib import Path

from stepfleet.orchestrator.cli.setup.data_folder import known_redis
from stepfleet.orchestrator.cli.terminal.output import notice
from stepfleet.orchestrator.dashboard.access import check_access
from stepfleet.orchestrator.errors import ConfigurationError
from stepfleet.orchestrator.store.dispatch import celery_app
from stepfleet.orchestrator.store.fleet.servers import redis_facts, refused_messages


def serve_flower(
    port: int,
    address: str,
    basic_auth: str | None,
    data: Path,
    kept: Path | None,
    *,
    content: bool | None,
) -> None:
    """Serve until SIGINT or SIGTERM; tasks are `kept` in that file, if any.

    `content`: texts of models and tools are shown to users with the password; None: as the settings
    say.

    Raises `AgentException` with the fix.
    """
    check_access(address, basic_auth)
    if kept is not None:
        _check_kept(kept)
    if find_spec("flower") is None:
        raise ConfigurationError('Flower is not installed: pip install "stepfleet[flower]"')
    # Imported here only: the module needs Flower.
    from stepfleet.orchestrator.dashboard.api.handling import Site  # noqa: PLC0415 - as below
    from stepfleet.orchestrator.dashboard.server import Address, serve  # noqa: PLC0415

    with known_redis(data) as settings:
        redis_facts(settings.store, prefix=settings.prefix)
        urls = {settings.store, settings.broker}
        serve(
            celery_app(settings),
            Address(address, port, basic_auth, kept),
            lambda url: notice(f"Flower: {url}"),
            lambda: asyncio.to_thread(refused_messages, urls, settings.prefix),
            Site.of(settings, content=content, is_local=basic_auth is None),
        )


def _check_kept(path: Path) -> None:
    """Raise `ConfigurationError` for a file of tasks that is unsafe or cannot be written.

    Flower reads Python objects from it, which can be any code.
    """
    folder = path.absolute().parent
    if not os.access(folder, os.W_OK):
        raise ConfigurationError(f"--flower-db {path}: {folder} is no folder that you may write to")
    for one in (path, Path(f"{path}.db"), Path(f"{path}.dat")):
        if one.exists() and (one.is_dir() or one.stat().st_uid != os.geteuid()):
            msg = f"--flower-db {path}: {one} is no file of yours; name another one"
            raise ConfigurationError(msg)
