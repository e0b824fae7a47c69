"""`stepfleet up`: a local fleet that runs until Ctrl-C."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.orchestrator.cli.local.fleet import FleetPlan, simulated, supervisor_of
from stepfleet.orchestrator.cli.local.process import Child
from stepfleet.orchestrator.cli.local.worker_command import watched_argv
from stepfleet.orchestrator.cli.options import DEFAULT_FLOWER_PORT, FLOWER_PORT
from stepfleet.orchestrator.cli.setup.data_folder import DataFolder, local_redis
from stepfleet.orchestrator.cli.setup.preflight import check_models
from stepfleet.orchestrator.cli.setup.reaching import warn_of
from stepfleet.orchestrator.cli.terminal.output import notice
from stepfleet.orchestrator.cli.terminal.signals import Interrupts, until_interrupted
from stepfleet.orchestrator.client.fleet import AsyncFleet
from stepfleet.orchestrator.errors import StoreError
from stepfleet.orchestrator.settings.settings import Settings, load_settings

_LOOK_SECONDS = 0.1


def run_up(plan: FleetPlan, data: Path, *, with_flower: bool) -> None:
    """Run the fleet until an interrupt."""
    agents = load_agents(plan.agents)
    if plan.simulate is None:
        check_models([agent.config for agent in agents.values()], os.environ)
    folder = DataFolder.prepare(data)
    lines = [
        f"{plan.workers} worker(s) with {', '.join(sorted(agents))}; logs in {folder.logs}",
        "Ctrl-C stops it. In another terminal: stepfleet submit FILE --agent NAME",
    ]
    if with_flower:
        lines.insert(1, f"Flower: http://127.0.0.1:{_flower_port()}")
    with local_redis(folder.root) as settings:
        warn_of(settings.store, prefix=settings.prefix)
        with _published_address(settings, folder):
            beside = [_flower(settings, folder)] if with_flower else []
            asyncio.run(_run(plan, settings, folder, beside, "\n".join(lines)))


async def _run(
    plan: FleetPlan, settings: Settings, folder: DataFolder, beside: list[Child], started: str
) -> None:
    interrupts = Interrupts()
    with interrupts.handled():
        async with simulated(plan, folder) as extra:
            fleet = supervisor_of(plan, settings, folder, extra, notice, beside)
            interrupts.before_exit(fleet.kill)
            await fleet.start()
            try:
                await until_interrupted(
                    _stand(settings, fleet.workers, started), interrupts, fleet.watch()
                )
            finally:
                notice(f"Stopping: steps in progress may finish (up to {settings.drain:g} s).")
                await fleet.stop()


async def _stand(settings: Settings, workers: Sequence[Child], started: str) -> None:
    """Say that the fleet has `started` when all `workers` have announced their agents, and wait."""
    host = socket.gethostname()
    async with AsyncFleet(settings=settings) as client:
        while True:
            with contextlib.suppress(StoreError):
                alive = {one.process for one in (await client.overview()).workers if one.alive}
                if {f"{host}:{one.pid}" for one in workers} <= alive:
                    break
            await asyncio.sleep(_LOOK_SECONDS)
    notice(started)
    await asyncio.Event().wait()


@contextlib.contextmanager
def _published_address(settings: Settings, folder: DataFolder) -> Iterator[None]:
    """Keep a private server's URL, with its password, in a file that only its owner can read."""
    if load_settings().redis_url is not None:
        yield
        return
    path = folder.url_file
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(settings.store)
    notice(
        "Commands in this folder find the fleet by themselves; elsewhere first:\n"
        f"  export STEPFLEET_REDIS_URL=$(cat {path})"
    )
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _flower(settings: Settings, folder: DataFolder) -> Child:
    argv = watched_argv("stepfleet.orchestrator.cli", "flower")
    env = {**os.environ, "STEPFLEET_REDIS_URL": settings.store}
    return Child("flower", argv, env, folder.log("flower"))


def _flower_port() -> int:
    given = os.environ.get(FLOWER_PORT, "")
    return int(given) if given.isdigit() else DEFAULT_FLOWER_PORT
