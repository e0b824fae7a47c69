"""`stepfleet doctor`: reads the facts of a set-up, checks them, and prints the findings."""

import asyncio
import os
import sys
from collections.abc import Iterable, Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from rich.table import Table
from rich.text import Text

from stepfleet.orchestrator.agents.config import AgentConfig
from stepfleet.orchestrator.agents.loader import load_agents
from stepfleet.orchestrator.cli.doctor import checks
from stepfleet.orchestrator.cli.setup import preflight
from stepfleet.orchestrator.cli.setup.data_folder import known_redis
from stepfleet.orchestrator.cli.setup.open_files import open_files_limit
from stepfleet.orchestrator.cli.terminal.exit_codes import COMPLETED, USAGE
from stepfleet.orchestrator.cli.terminal.output import print_either
from stepfleet.orchestrator.errors import AgentException
from stepfleet.orchestrator.settings.settings import Settings, load_settings
from stepfleet.orchestrator.store.embedded.folder import Folder
from stepfleet.orchestrator.store.embedded.server import find_server_binary
from stepfleet.orchestrator.store.fleet.checks import (
    Check,
    FleetRead,
    State,
    fail,
    fleet_checks,
    good,
    read_fleet,
    server_checks,
    warn,
)
from stepfleet.orchestrator.store.store import open_store

_WORKER_MODULES = ("aiohttp", "greenlet", "yarl")
_PATIENCE_SECONDS = 3.0
_THERE = ", if its workers have the same"
_STYLES = {State.OK: "green", State.WARN: "yellow", State.FAIL: "red"}


def diagnose(agents: str | None, data: Path, *, json: bool) -> int:
    """Print all findings with their fixes; exit code 2 where a check fails."""
    found = list(_all(agents, data))
    print_either(found, table, json=json, as_data=lambda all_: [one.to_dict() for one in all_])
    return USAGE if any(check.state is State.FAIL for check in found) else COMPLETED


def table(found: Iterable[Check]) -> Table:
    """Return the findings as a table. Pure."""
    shown = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for check in found:
        text = Text(check.found)
        if check.fix:
            text.append(f"\nfix: {check.fix}", style="bold")
        shown.add_row(Text(check.state.value, style=_STYLES[check.state]), check.check, text)
    return shown


def _all(reference: str | None, data: Path) -> Iterator[Check]:
    yield checks.python(sys.version_info[:3])
    yield checks.libraries(
        metadata.requires("stepfleet") or [],
        {one.name.lower(): one.version for one in metadata.distributions() if one.name},
    )
    yield checks.worker_extra([name for name in _WORKER_MODULES if find_spec(name) is None])
    configs: list[AgentConfig] = []
    if reference:
        try:
            configs = [agent.config for agent in load_agents(reference).values()]
            yield good("agent module", ", ".join(sorted(one.name for one in configs)))
        except AgentException as error:
            yield fail("agent module", str(error), "correct it, then run doctor again")
    try:
        settings = load_settings()
    except AgentException as error:
        yield fail("settings", str(error), "correct the variable or stepfleet.toml")
        return
    named = [config.name for config in configs]
    is_here = bool(configs)
    yield checks.variables(os.environ, Settings.model_fields, named)
    yield checks.open_files(open_files_limit(), settings.slots)
    if settings.redis_url is None and not Folder(data.expanduser().absolute()).has_data:
        yield _private_server()
        yield from _models(configs, is_here=is_here)
        return
    try:
        with known_redis(data) as used:
            yield from server_checks(used)
            read = asyncio.run(_fleet(used))
            yield from fleet_checks(read, used.queue)
            configs = configs or list(read.agents)
    except AgentException as error:
        yield fail("Redis", str(error), "see the message")
    yield from _models(configs, is_here=is_here)


async def _fleet(settings: Settings) -> FleetRead:
    quick = settings.model_copy(update={"patience": _PATIENCE_SECONDS})
    opened = await open_store(quick)
    try:
        return await read_fleet(opened)
    finally:
        await opened.aclose()


def _private_server() -> Check:
    try:
        binary = find_server_binary().path
    except AgentException as error:
        return fail("Redis", "none named, none to start", str(error))
    return good("Redis", f"none named: 'run' and 'up' start a private one ({binary})")


def _models(configs: Iterable[AgentConfig], *, is_here: bool) -> Iterator[Check]:
    """Judge key and address of each agent's model; no prompt is sent.

    Unless the agents were named here, only workers call their models: these may have what is
    lacking here.
    """
    usable = []
    for config in (one for listed in configs for one in listed.by_model):
        try:
            preflight.target_of(config, os.environ)
        except AgentException as error:
            judge, there = (fail, "") if is_here else (warn, _THERE)
            yield judge("model", str(error), f"correct the address{there}")
        else:
            usable.append(config)
    for agent, target, finding in preflight.examined(usable, os.environ):
        key = f", {target.key} is set" if target.key else ""
        if finding is None:
            yield good(f"model of {agent}", f"{target.base_url} answers{key}")
        elif is_here:
            yield fail(finding.about, finding.found, finding.fix)
        elif preflight.missing_key(agent, target, os.environ):
            yield good(finding.about, f"{target.key} is not set here; its workers need it")
        else:
            yield warn(finding.about, finding.found, f"{finding.fix}{_THERE}")
