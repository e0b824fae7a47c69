"""`stepfleet up`: a local fleet that stands until Ctrl-C."""

import asyncio
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.orchestrator.cli.local.fleet import FleetPlan, simulated, supervisor_of
from stepfleet.orchestrator.cli.local.process import Child
from stepfleet.orchestrator.cli.local.worker_command import flower_port, leashed_argv
from stepfleet.orchestrator.cli.setup.data_folder import DataFolder, local_redis
from stepfleet.orchestrator.cli.setup.preflight import check_models
from stepfleet.orchestrator.cli.setup.redis_facts import warn_of
from stepfleet.orchestrator.cli.terminal.exit_codes import COMPLETED
from stepfleet.orchestrator.cli.terminal.output import notice
from stepfleet.orchestrator.cli.terminal.signals import Interrupts, until_asked
from stepfleet.orchestrator.settings.settings import Settings, load_settings


def stand(plan: FleetPlan, data: Path, *, with_flower: bool) -> int:
    """Run the fleet until somebody asks to stop; return the exit code."""
    agents = load_agents(plan.agents)
    if plan.simulate is None:
        check_models([agent.config for agent in agents.values()], os.environ)
    folder = DataFolder.prepare(data)
    with local_redis(folder) as settings:
        warn_of(settings.store)
        with _address_told(settings, folder):
            asyncio.run(_stand(plan, settings, folder, sorted(agents), with_flower=with_flower))
    return COMPLETED


async def _stand(
    plan: FleetPlan,
    settings: Settings,
    folder: DataFolder,
    agents: list[str],
    *,
    with_flower: bool,
) -> None:
    interrupts = Interrupts()
    with interrupts.heard():
        async with simulated(plan, folder) as extra:
            beside = [_flower(settings, folder)] if with_flower else []
            fleet = supervisor_of(plan, settings, folder, extra, notice, beside)
            interrupts.before_leaving_at_once(fleet.kill)
            await fleet.start()
            notice(_standing(plan, folder, agents, with_flower=with_flower))
            try:
                await until_asked(asyncio.Event().wait(), interrupts.asked, fleet.watch())
            finally:
                notice(f"Stopping: steps under way may end (up to {settings.drain:g} s).")
                await fleet.stop()


def _standing(plan: FleetPlan, folder: DataFolder, agents: list[str], *, with_flower: bool) -> str:
    lines = [
        f"{plan.workers} worker(s) with {', '.join(agents)}; logs in {folder.root / 'logs'}",
        "Ctrl-C stops it. In another terminal: stepfleet submit FILE --agent NAME",
    ]
    if with_flower:
        lines.insert(1, f"Flower: http://127.0.0.1:{flower_port(os.environ)}")
    return "\n".join(lines)


@contextlib.contextmanager
def _address_told(settings: Settings, folder: DataFolder) -> Iterator[None]:
    """Say how others reach a private server; its password is in a file of its owner only."""
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
    argv = leashed_argv("stepfleet.orchestrator.cli", "flower")
    env = {**os.environ, "STEPFLEET_REDIS_URL": settings.store}
    return Child("flower", argv, env, folder.log("flower"))
